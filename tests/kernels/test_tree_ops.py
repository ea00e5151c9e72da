"""Convolutions and scans of trees: the documented index arithmetic, and random trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import replay, replay_conv_state, tree_conv1d, tree_scan
from pallas_kernels.tree_conv1d import reference
from pallas_kernels.tree_scan.reference import tree_scan as tree_scan_reference
from tests.cases.base import ancestor_mask, conv_gather_index, relative_error, replay_gather_index
from tests.cases.tree_scan import CASES, inputs


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_replay_conv_state(case):
    values = inputs(case)
    truth = reference.replay_conv_state(
        values.conv_input, values.conv_state, values.parents, values.last
    )
    parents, last = (jnp.asarray(value, jnp.int32) for value in (values.parents, values.last))
    both = (jnp.asarray(value, jnp.float32) for value in (values.conv_input, values.conv_state))
    got = replay_conv_state(*both, replay_gather_index(parents, last, case.width))
    np.testing.assert_array_equal(got, truth)


def test_the_documented_window():
    parents = jnp.array([[-1, 0, 0, 1, 1, 2]], jnp.int32)
    window = conv_gather_index(parents, 4)[0]
    assert window[0].tolist() == [0, 1, 2, 3]
    assert window[2].tolist() == [1, 2, 3, 5]
    assert window[5].tolist() == [2, 3, 5, 8]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 6])
def test_conv_state_mixes_cache_and_path(accepted):
    """Paths shorter and longer than K - 1 = 3."""
    nodes = jnp.arange(1.0, 9.0).reshape(1, 8, 1)
    before = -jnp.array([3.0, 2.0, 1.0]).reshape(1, 3, 1)
    chain = jnp.arange(-1, 7, dtype=jnp.int32)[None]
    window = replay_gather_index(chain, jnp.array([accepted], jnp.int32), 4)
    got = replay_conv_state(nodes, before, window)
    assert got[0, :, 0].tolist() == [-3, -2, -1, *range(1, accepted + 2)][-3:]


CASE = CASES["tree"].but(batch=1, nodes=9, heads=2, head_dim=4, state=8)
INPUTS = inputs(CASE)
WIDTH = CASE.width


# Random trees of any shape, as data: one program serves them all.
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
    y = tree_scan(*(f32[name] for name in names), mask)
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
