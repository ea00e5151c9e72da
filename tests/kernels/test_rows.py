"""A row has the same bits alone and among others: in our kernels, and in native code.

For kernels the interpreter shows it, whose products and sums are not those of a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import triton
from tests.cases import base, moe

LAYOUT = pk.Mamba2Layout(2, 16, 1, 16, x_heads=2, b_groups=1)


def drawn(rows, *shape):
    """Numbers in the type of the rows; None: float32."""
    numbers = 4 * np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(numbers, "float32" if rows is None else rows.dtype)


def add_rms_norm(rows, **options):
    parts = jnp.square(rows[:, :5].astype(jnp.float32))
    deferred = pk.DeferredRMSNorm(jnp.flip(rows, axis=1), parts, 1e-5)
    return pk.add_rms_norm(rows, deferred, rows[0], epsilon=1e-5, multiplier=0.7, **options)


def expert_mlps(rows, **options):
    """Eight experts a token; an expert has some 43 of 64 tokens."""
    case = moe.MANY.but(tokens=64, experts=12, active=8, bf16=rows.dtype == jnp.bfloat16)
    *of_tokens, into, out = moe.on_device(case)
    of_tokens = [array[: len(rows)] for array in of_tokens]
    return pk.expert_mlps(*of_tokens, into, out, activation="silu", gated=True, **options)


def in_tree(rows):
    """The conv gather index of nodes of a binary tree, whose first nodes are a tree, too."""
    return base.conv_gather_index((jnp.arange(len(rows), dtype=jnp.int32)[None] - 1) // 2, 4)


def weights(rows, channels):
    return drawn(rows, 4, channels), drawn(rows, channels)


def tree_conv1d(rows, **options):
    state = drawn(rows, 1, 3, rows.shape[1])
    arrays = rows[None], state, *weights(rows, rows.shape[1]), in_tree(rows)
    return pk.tree_conv1d(*arrays, activation="silu", **options)[0]


def tree_conv1d_layer(rows, **options):
    """After a path of two nodes of a tree of 67 nodes, 63 or 4; five nodes in two levels."""
    channels, num_old, small = LAYOUT.num_channels, 68 - len(rows), functools.partial(drawn, rows)
    old = (
        small(num_old, 2, 16),
        drawn(None, num_old, 2),
        small(num_old, 1, 16),
        small(67, channels),
    )
    old = pk.Mamba2Pending(*(array[None, :num_old] for array in old))
    chain = jnp.arange(num_old, dtype=jnp.int32)[None] - 1
    how = dict(previous=(old, base.replay_gather_index(chain, jnp.array([1], jnp.int32), 4)))
    run = functools.partial(pk.tree_conv1d_layer, layout=LAYOUT, **options)
    arrays, index, state = (
        (*weights(rows, channels), drawn(None, 2)),
        in_tree(rows),
        small(1, 3, channels),
    )
    queries = []
    for level in [slice(0, 2), slice(2, 5)] if len(rows) == 5 else [slice(0, len(rows))]:
        pending, query, state = run(rows[None, level], *arrays, state, index[:, level], **how)
        queries, how = [*queries, query], dict(prefix_pending=pending)
    results = pending, jnp.concatenate(queries, axis=1), state
    return jax.tree.map(lambda array: array[0], results)


class Rows(NamedTuple):
    """An op of rows, which draws what else it needs."""

    run: Callable[..., Any]
    width: int
    kernels: set[str]
    native: bool = True


OPS = {
    "rms_norm": Rows(
        lambda rows, **options: pk.rms_norm(rows, rows[0], epsilon=1e-5, **options),
        336,
        {"rms_norm"},
    ),
    "add_rms_norm": Rows(add_rms_norm, 336, {"add_rms_norm"}),
    "gated_rms_norm": Rows(
        lambda rows, **options: pk.gated_rms_norm(rows, rows, rows[0], num_groups=3, **options),
        96,
        {"gated_rms_norm"},
    ),
    "log_softmax": Rows(pk.log_softmax, 5003, {"log_softmax", "log_softmax_sums"}),
    "expert_mlps": Rows(expert_mlps, 1, {"expert_product"}, native=False),
    "tree_conv1d": Rows(tree_conv1d, 48, {"tree_conv1d"}),
    "tree_conv1d_layer": Rows(tree_conv1d_layer, LAYOUT.num_columns, {"tree_conv1d"}),
}


def runs():
    for op in OPS:
        yield op, "float32", "pallas_interpret"
        yield pytest.param(op, "bfloat16", "pallas_interpret", marks=pytest.mark.thorough)
        if OPS[op].native:
            yield pytest.param(op, "float32", "native", marks=base.NEEDS_NATIVE)


@pytest.mark.parametrize(("op", "dtype", "implementation"), [*runs()])
def test_a_row_is_the_same_among_others(op, dtype, implementation):
    """Numbers of rows change the blocks of nodes and of an expert's rows."""
    rows = drawn(jnp.empty(0, dtype), 64, OPS[op].width)
    run = jax.jit(functools.partial(OPS[op].run, implementation=implementation))
    want = run(rows)
    for count in (1, 5):
        for wanted, have in zip(*map(jax.tree.leaves, (want, run(rows[:count]))), strict=True):
            np.testing.assert_array_equal(have, wanted[: len(have)])
    if implementation == "pallas_interpret":
        assert OPS[op].kernels <= triton.IN_ONE_ORDER
