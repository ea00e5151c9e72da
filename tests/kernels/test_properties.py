"""Random trees of any shape, as data: one program serves them all."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    conv_gather_index,
    replay,
    replay_conv_state,
    replay_gather_index,
    tree_conv1d,
)
from pallas_kernels import tree_scan as tree_scan_op
from pallas_kernels.tree_scan.reference import tree_scan as tree_scan_reference
from tests.cases import tree_scan as cases
from tests.cases.base import ancestor_mask, relative_error

CASE = cases.CASES["tree"].but(batch=1, nodes=9, heads=2, head_dim=4, state=8)
INPUTS = cases.inputs(CASE)
WIDTH = CASE.width


@st.composite
def trees(draw):
    """Parents, and how many of the first nodes exist."""
    parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, CASE.nodes))]
    return np.array([parents]), draw(st.integers(1, CASE.nodes))


@jax.jit
def run(parents, mask, last):
    """The scan of a tree, and the states after one of its paths."""
    f32 = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), vars(INPUTS))
    names = ("x", "dt", "A", "B", "C", "D", "state")
    conv = (f32["conv_input"], f32["conv_state"])
    y = tree_scan_op(*(f32[name] for name in names), mask)
    path = jnp.take_along_axis(mask, last[:, None, None], axis=1)[:, 0]
    state = replay(f32["x"], f32["dt"], f32["A"], f32["B"], f32["state"], path)
    out = tree_conv1d(
        *conv, f32["conv_weight"], f32["conv_bias"], conv_gather_index(parents, WIDTH)
    )
    kept = replay_conv_state(*conv, replay_gather_index(parents, last, WIDTH))
    return y, state, out, kept


@settings(max_examples=40)
@given(trees(), st.data())
def test_ops_on_random_trees(tree, data):
    parents, exists = tree
    mask = ancestor_mask(parents) & (np.arange(CASE.nodes) < exists)
    last = data.draw(st.integers(0, exists - 1))
    y, state, out, kept = run(jnp.asarray(parents), jnp.asarray(mask), jnp.array([last]))
    i = INPUTS
    truth, states = tree_scan_reference(i.x, i.dt, i.A, i.B, i.C, i.D, i.state, parents)
    assert relative_error(y[:, :exists], truth[:, :exists]) < 1e-6
    assert relative_error(state[0], states[0, last]) < 1e-6

    # The path, flattened into a plain sequence.
    path = np.flatnonzero(mask[0, last])
    sequence = np.concatenate([i.conv_state[0], i.conv_input[0, path]])
    np.testing.assert_allclose(kept[0], sequence[-(WIDTH - 1) :], rtol=1e-6)
    want = (sequence[-WIDTH:] * i.conv_weight).sum(0) + i.conv_bias
    np.testing.assert_allclose(out[0, last], want, atol=1e-5)
