"""A row has the same bits alone and among others.

The interpreter shows the order of our kernels; its products and sums are not those of a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import triton
from tests.cases.base import conv_gather_index, replay_gather_index
from tests.helpers import some

NUMBERS = jnp.asarray(4 * np.random.default_rng(0).normal(size=(64, 5040)), jnp.float32)
LAYOUT = pk.Mamba2Layout(2, 16, 1, 16, x_heads=2, b_groups=1)
drawn = functools.partial(jnp.resize, NUMBERS)  # of a shape
run = functools.partial(functools.partial, implementation="pallas_interpret")


def added(rows):
    deferred = pk.DeferredRMSNorm(rows, jnp.square(rows[:, :5]), 1e-5)
    return run(pk.add_rms_norm)(rows, deferred, rows[0], epsilon=1e-5, multiplier=0.7)


def experts(rows):
    """Each of 12 experts has some 43 of 64 tokens."""
    chosen = jnp.argsort(rows[:, :12])[:, :8].astype(jnp.int32)
    arrays = rows[:, :32], jnp.abs(rows[:, :8]), chosen, drawn((12, 32, 96)), drawn((12, 48, 32))
    return run(pk.expert_mlps, activation="silu", gated=True)(*arrays)


def convolved(rows):
    """Nodes of a tree, after a path of two nodes in a tree of 67 nodes, 63 or 4."""
    above, chain = (jnp.arange(n, dtype=jnp.int32)[None] - 1 for n in (len(rows), 68 - len(rows)))
    old = pk.Mamba2Pending(*(drawn((1, chain.size, *n)) for n in ((2, 16), (2,), (1, 16), (64,))))
    pending, *results = run(pk.tree_conv1d_layer, layout=LAYOUT)(
        rows[None, :, : LAYOUT.num_columns],
        *(drawn((4, 64)), drawn(64), drawn(2), drawn((1, 3, 64))),
        conv_gather_index(above // 2, 4),
        previous=(old, replay_gather_index(chain, chain[:, 2], 4)),
    )
    return [array[0] for array in (*pending, *results)]


KERNELS = {
    "rms_norm": lambda rows: run(pk.rms_norm, epsilon=1e-5)(rows, rows[0]),
    "add_rms_norm": added,
    "gated_rms_norm": lambda rows: run(pk.gated_rms_norm, num_groups=3)(rows, rows, rows[0]),
    "log_softmax": run(pk.log_softmax),
    "expert_product": experts,
    "tree_conv1d": convolved,
}


@pytest.mark.parametrize("name", some(KERNELS, "log_softmax", "tree_conv1d"))
def test_a_row_is_the_same_among_others(name):
    program = jax.jit(KERNELS[name])
    want = jax.tree.leaves(program(NUMBERS))
    for count in (1, 5):
        for wanted, have in zip(want, jax.tree.leaves(program(NUMBERS[:count])), strict=True):
            np.testing.assert_array_equal(have, wanted[: len(have)])
    assert name in triton.IN_ONE_ORDER
