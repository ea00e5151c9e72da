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


@pytest.fixture
def run_as_on_a_gpu(monkeypatch):
    """Sets how kernels are interpreted from now on: in order, or the last program first.

    Kernels are jitted: programs traced before are dropped, and in the end those traced here.
    """
    call, program_id = triton.call, pl.program_id
    names = []

    def set_order(*, last_first: bool):
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
                    turned,
                    (in_specs, out_specs),
                    is_leaf=lambda value: isinstance(value, pl.BlockSpec),
                )
            names.append(options["name"])
            kernel = in_place(kernel, len(in_specs), options.get("input_output_aliases", {}))
            return call(kernel, grid=grid, in_specs=in_specs, out_specs=out_specs, **options)

        monkeypatch.setattr(triton, "call", interpreted)
        monkeypatch.setattr(pl, "program_id", of_program)

    jax.clear_caches()
    yield set_order
    jax.clear_caches()
    assert names, "no kernel was traced"


# Kernels that update in place, also in rows with an empty path, or whose programs share outputs.
CASES = [
    ("mamba2_layer", "blocks of channels"),
    ("mamba2_layer", "prefix, blocks of nodes"),
    ("mamba2_layer", "repeated, prefix"),
    ("tree_attention_layer", "shared, more nodes than a block"),
    ("tree_attention_layer", "prefix, blocks of nodes"),
    ("replay_tree_scan", "groups"),
    ("replay", "groups"),
    ("ssd", "blocks of channels"),
    ("expert_mlps", "blocks of rows"),
    ("expert_mlps", "experts that nobody chooses"),
    ("tree_attention", "a piece of a prompt"),
]


@pytest.mark.parametrize("last_first", [False, True], ids=["in order", "last first"])
@pytest.mark.parametrize(("op", "name"), CASES, ids=[": ".join(case) for case in CASES])
def test_programs_need_nothing_of_each_other(op, name, last_first, run_as_on_a_gpu):
    run_as_on_a_gpu(last_first=last_first)
    table, case = OPS[op], OPS[op].cases[name]
    found = table.errors.__wrapped__(case, "pallas_interpret")
    for output, budget in table.budgets(case).items():
        assert found[output] < budget.most, output
