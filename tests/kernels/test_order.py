"""A kernel's programs may run in any order, or at once: none may need what another one writes.

The interpreter hides that: it runs programs in order, and gives each the original of what is
updated in place. Here input and output are one array, as on a GPU, and programs run in both orders:
a read of what another program writes comes after the write in one order and before it in the other.
Where programs write to the same place, they must write the same.
"""

import jax
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import triton
from tests.cases.ops import OPS

pytestmark = pytest.mark.thorough


def in_place(kernel, num_inputs, aliases):
    """The kernel, reading each input that is updated in place from its output."""

    def run(*refs):
        inputs, treedef = jax.tree.flatten(refs[:num_inputs])
        outputs = jax.tree.leaves(refs[num_inputs:])
        for source, target in aliases.items():
            assert inputs[source].shape == outputs[target].shape
            inputs[source] = outputs[target]
        kernel(*jax.tree.unflatten(treedef, inputs), *refs[num_inputs:])

    return run


# Kernels that run in order are those of test_ops.py, but for what they leave in place.
IN_ORDER = pytest.param(False, marks=pytest.mark.slow, id="in order")


@pytest.fixture(scope="module", params=[IN_ORDER, pytest.param(True, id="last first")])
def names(request):
    """Names of traced kernels, run in order or the last program first."""
    last_first, names = request.param, []
    call, program_id = triton.call, pl.program_id

    def of_program(axis):
        number = program_id(axis)
        return pl.num_programs(axis) - 1 - number if last_first else number

    def interpreted(kernel, *, grid, in_specs, out_specs, **options):
        def turned(spec):
            def index_map(*numbers):
                pairs = zip(grid, numbers, strict=True)
                return spec.index_map(*[size - 1 - number for size, number in pairs])

            return pl.BlockSpec(spec.block_shape, index_map)

        if last_first:
            in_specs, out_specs = jax.tree.map(
                turned, (in_specs, out_specs), is_leaf=lambda value: isinstance(value, pl.BlockSpec)
            )
        names.append(options["name"])
        kernel = in_place(kernel, len(in_specs), options.get("input_output_aliases", {}))
        return call(kernel, grid=grid, in_specs=in_specs, out_specs=out_specs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "call", interpreted)
        patch.setattr(pl, "program_id", of_program)
        jax.clear_caches()
        yield names
        jax.clear_caches()


# Kernels that update in place, also in rows with an empty path, or whose programs share outputs.
CASES = [
    ("mamba2_layer", "blocks of channels"),
    ("mamba2_layer", "prefix, blocks of nodes"),
    ("mamba2_layer", "repeated, prefix"),
    ("tree_attention_layer", "shared, more nodes than a block"),
    ("tree_attention_layer", "prefix, blocks of nodes"),
    ("tree_attention_layer", "normed, a gate before"),
    ("short_conv_layer", "prefix, blocks of nodes"),
    ("replay_tree_scan", "groups"),
    ("replay", "groups"),
    ("replay_tree_delta", "padded nodes"),
    ("replay_tree_delta", "channels, tree"),
    ("replay_tree_delta", "three rows, one with an empty path"),
    ("ssd", "blocks of channels"),
    ("ssd", "three segments"),
    ("expert_mlps", "blocks of rows"),
    ("expert_mlps", "experts that nobody chooses"),
    ("tree_attention", "a piece of a prompt"),
]


@pytest.mark.parametrize(("op", "name"), CASES, ids=[": ".join(case) for case in CASES])
def test_programs_need_nothing_of_each_other(op, name, names):
    names.clear()
    table, case = OPS[op], OPS[op].cases[name]
    found = table.errors.__wrapped__(case, "pallas_interpret")
    assert names, "no kernel was traced"
    for output, budget in table.budgets(case).items():
        assert found[output] < budget.most, output
