"""A kernel's programs may run in any order, or at once: none may need what another one writes.

The interpreter hides that: it runs programs in order, and gives each the original of what is
updated in place. Here, as on a GPU, that is one array; and the last program runs first. What one
program reads of what another writes then shows, for it is written before in one order and after in
the other. Where programs write to the same place they must write the same.
"""

import jax
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import triton
from tests.kernels import (
    test_mamba2_layer,
    test_moe,
    test_ssd,
    test_tree_attention,
    test_tree_attention_layer,
    test_tree_ops,
)


def in_place(kernel, num_inputs, aliases):
    """The kernel, with the outputs that take an input's memory also in the input's place."""

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

    The kernels are jitted: programs traced before are forgotten, and those traced here afterwards.
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


# Kernels that update in place, or where programs share what they write.
CASES = [
    (test_mamba2_layer, "blocks of channels"),
    (test_mamba2_layer, "tree, and a row with an empty path"),
    (test_mamba2_layer, "prefix, blocks of nodes"),
    (test_mamba2_layer, "repeated, prefix"),
    (test_tree_attention_layer, "shared, more nodes than a block"),
    (test_tree_attention_layer, "prefix, blocks of nodes"),
    (test_tree_ops, "groups"),
    (test_ssd, "blocks of channels"),
    (test_moe, "blocks of rows"),
    (test_moe, "experts that nobody chooses"),
    (test_tree_attention, "a piece of a prompt"),
]


@pytest.mark.parametrize("last_first", [False, True], ids=["in order", "last first"])
@pytest.mark.parametrize(
    ("module", "name"), CASES, ids=[f"{m.__name__.split('_', 1)[1]}: {n}" for m, n in CASES]
)
def test_programs_need_nothing_of_each_other(module, name, last_first, run_as_on_a_gpu):
    run_as_on_a_gpu(last_first=last_first)
    (case,) = [case for case in module.CASES if case.name == name]
    if module is test_tree_attention_layer:
        module.test_tree_attention_layer(case, "pallas_interpret")
    elif module is test_tree_attention:
        module.test_tree_attention(case, True)
    elif module is test_moe:
        found = module.error.__wrapped__(case, "pallas_interpret")
        assert found < module.BUDGET[case.bf16]
    elif module is test_ssd:
        assert max(module.errors.__wrapped__(case, "pallas_interpret")) < module.BUDGET[case.bf16]
    elif module is test_mamba2_layer:
        found = module.errors.__wrapped__(case, "pallas_interpret")
        assert max(found.values()) < module.GATED_BUDGET[case.bf16]
    else:
        found = module.replayed_and_scanned.__wrapped__(case, "pallas_interpret")
        assert max(found) < module.BUDGET[case.bf16]
        module.test_replay(case, "pallas_interpret")
