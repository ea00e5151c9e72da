"""A row has the same bits alone and among others: in our kernels, and in native code.

Of kernels the interpreter shows it, whose products and sums are not those of a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import triton
from tests.cases import base

NUMBERS = jnp.asarray(4 * np.random.default_rng(0).normal(size=(64, 5040)), jnp.float32)
LAYOUT = pk.Mamba2Layout(2, 16, 1, 16, x_heads=2, b_groups=1)


def drawn(*shape):
    return jnp.resize(NUMBERS, shape)


def added(rows, **options):
    deferred = pk.DeferredRMSNorm(rows, jnp.square(rows[:, :5]), 1e-5)
    return pk.add_rms_norm(rows, deferred, rows[0], epsilon=1e-5, multiplier=0.7, **options)


def experts(rows, **options):
    """Each of 12 experts has some 43 of 64 tokens."""
    chosen = jnp.argsort(rows[:, :12])[:, :8].astype(jnp.int32)
    matrices = drawn(12, 32, 96), drawn(12, 48, 32)
    how = dict(activation="silu", gated=True, **options)
    return pk.expert_mlps(rows[:, :32], jnp.abs(rows[:, :8]), chosen, *matrices, **how)


def convolved(rows, **options):
    """Nodes after a path of two nodes in a tree of 67 nodes, 63 or 4; five nodes in two levels."""
    num_nodes, num_old = len(rows), 68 - len(rows)
    tree, chain = (jnp.arange(n, dtype=jnp.int32)[None] - 1 for n in (num_nodes, num_old))
    index = base.conv_gather_index(tree // 2, 4)
    path = base.replay_gather_index(chain, jnp.array([1], jnp.int32), 4)
    shapes = (2, 16), (2,), (1, 16), (LAYOUT.num_channels,)
    how = dict(previous=(pk.Mamba2Pending(*(drawn(1, num_old, *shape) for shape in shapes)), path))
    state, queries = drawn(1, 3, LAYOUT.num_channels), []
    arrays = drawn(4, LAYOUT.num_channels), drawn(LAYOUT.num_channels), drawn(2)
    run = functools.partial(pk.tree_conv1d_layer, layout=LAYOUT, **options)
    for level in [slice(2), slice(2, 5)] if num_nodes == 5 else [slice(num_nodes)]:
        projected = rows[None, level, : LAYOUT.num_columns]
        pending, query, state = run(projected, *arrays, state, index[:, level], **how)
        queries, how = [*queries, query], dict(prefix_pending=pending)
    results = pending, jnp.concatenate(queries, axis=1), state
    return jax.tree.map(lambda array: array[0], results)


OPS = {
    "rms_norm": lambda rows, **options: pk.rms_norm(rows, rows[0], epsilon=1e-5, **options),
    "add_rms_norm": added,
    "gated_rms_norm": lambda rows, **options: pk.gated_rms_norm(
        rows, rows, rows[0], num_groups=3, **options
    ),
    "log_softmax": pk.log_softmax,
    "expert_product": experts,
    "tree_conv1d": convolved,
}


@pytest.mark.parametrize(
    "implementation", ["pallas_interpret", pytest.param("native", marks=base.NEEDS_NATIVE)]
)
@pytest.mark.parametrize("op", OPS)
def test_a_row_is_the_same_among_others(op, implementation):
    if (op, implementation) == ("expert_product", "native"):
        pytest.skip("native code has packed experts only")
    run = jax.jit(functools.partial(OPS[op], implementation=implementation))
    want = run(NUMBERS)
    for count in (1, 5):
        for wanted, have in zip(*map(jax.tree.leaves, (want, run(NUMBERS[:count]))), strict=True):
            np.testing.assert_array_equal(have, wanted[: len(have)])
    assert implementation == "native" or op in triton.IN_ONE_ORDER
