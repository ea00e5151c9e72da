"""`short_conv_layer`: a gated short convolution between its projections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import PartialSums, native, short_conv_layer
from pallas_kernels.tree_conv1d import reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

CASES = base.table(
    {
        "root only": dict(nodes=1, replayed=1),
        "tree, and a row with an empty path": dict(batch=3, bias=True),
        "prefix, blocks of nodes": dict(nodes=21, prefix=9, width=4),
        "prefix before the path is written": dict(nodes=7, prefix=6, late=True),
        "blocks of channels": dict(channels=192, bf16=True),
        "a projection in parts": dict(parts=4, bf16=True, bias=True),
    },
    batch=2,
    nodes=9,
    replayed=5,
    prefix=0,  # nodes that a first call runs, before a second call runs the others
    late=False,  # that one writes the path, too
    channels=48,
    width=3,
    bias=False,
    parts=0,
)


@functools.cache
def errors(case, implementation):
    """Of outputs and products; the conv state is exact."""
    rng, draw = base.drawn(case)
    batch, channels, last = case.batch, case.channels, np.array([-1, case.replayed - 1, 0])
    parents, old_parents = (
        base.random_parents(rng, batch, count) for count in (case.nodes, case.replayed)
    )
    last = last[:batch]
    projected = draw(batch, case.nodes, 3 * channels)
    weight, bias = draw(case.width, channels), draw(channels) if case.bias else None
    state, old = draw(batch, case.width - 1, channels), draw(batch, case.replayed, channels)
    truth = reference.short_conv_layer(
        projected, weight, bias, state, parents, previous=(old, old_parents, last)
    )

    on_device = functools.partial(base.on_device, kind=case.kind)
    index = base.conv_gather_index(base.on_device(parents, jnp.int32), case.width)
    back = base.replay_gather_index(
        *(base.on_device(array, jnp.int32) for array in (old_parents, last)), case.width
    )
    weights = on_device(weight), None if bias is None else on_device(bias)

    def layer(nodes, state, prefix, previous):
        new = on_device(projected[:, nodes])
        if case.parts:  # whose sum is exact
            wide = new.astype(jnp.float32)
            new = PartialSums(jnp.stack([wide, 0 * wide, -wide, wide]), new.dtype)
        return short_conv_layer(
            *(new, *weights, state, index[:, nodes]),
            prefix_pending=prefix,
            previous=previous,
            implementation=implementation,
        )

    def run(first, end, *arrays):
        return jax.jit(functools.partial(layer, slice(first, end)))(*arrays)

    first, previous = case.prefix or case.nodes, (on_device(old), back)
    y, products, after = run(0, first, on_device(state), None, previous)
    if case.prefix:
        before, previous = (on_device(state), previous) if case.late else (after, None)
        more, products, after = run(first, case.nodes, before, products, previous)
        y = jnp.concatenate([y, more], axis=1)
    assert {y.dtype, products.dtype, after.dtype} == {case.kind}
    np.testing.assert_array_equal(np.asarray(after, np.float64), truth[2])
    return {
        "y": relative_error(y, truth[0]),
        "products": relative_error(products, truth[1]),
    }


def budgets(case):
    # In bfloat16 the products are rounded, and their convolution is.
    return dict.fromkeys(("y", "products"), Budget(2 * base.OUTPUT[case.bf16]))


def lacks(case, implementation):
    is_odd = implementation == "native" and case.channels % native.LANES != 0
    return is_odd or base.native_lacks_bf16(case, implementation)


SHORT_CONV_LAYER = Op(CASES, errors, budgets, base.WITH_NATIVE, lacks=lacks)
