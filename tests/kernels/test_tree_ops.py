"""Tree ops: states of convolutions, index arithmetic and masks."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import replay_conv_state, tree_conv1d, tree_scan
from pallas_kernels.tree_conv1d import reference as conv_reference
from pallas_kernels.tree_scan import reference as scan_reference
from tests.cases.base import ON_CPU_AND_GPU, conv_gather_index, replay_gather_index
from tests.cases.tree_scan import CASES
from tests.cases.tree_scan import inputs as make_inputs


@pytest.mark.parametrize("implementation", ON_CPU_AND_GPU)
def test_tree_conv1d_without_bias(implementation):
    inputs = jnp.arange(32, dtype=jnp.float32).reshape(1, 2, 16)
    window = conv_gather_index(jnp.array([[-1, 0]], jnp.int32), 2)
    got = tree_conv1d(
        *(inputs, jnp.ones((1, 1, 16)), jnp.full((2, 16), 2.0), None, window),
        implementation=implementation,
    )
    np.testing.assert_array_equal(
        got[0], [2 * (inputs[0, 0] + 1), 2 * (inputs[0, 1] + inputs[0, 0])]
    )


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_replay_conv_state(case):
    inputs = make_inputs(case)
    truth = conv_reference.replay_conv_state(
        inputs.conv_input, inputs.conv_state, inputs.parents, inputs.last
    )
    window = replay_gather_index(
        jnp.asarray(inputs.parents, jnp.int32), jnp.asarray(inputs.last, jnp.int32), case.width
    )
    got = replay_conv_state(
        jnp.asarray(inputs.conv_input, jnp.float32),
        jnp.asarray(inputs.conv_state, jnp.float32),
        window,
    )
    np.testing.assert_array_equal(got, truth)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 6])
def test_conv_state_mixes_cache_and_path(accepted):
    """Paths shorter and longer than K - 1 = 3."""
    inputs = np.arange(1, 9, dtype=np.float32).reshape(1, 8, 1)
    before = -np.array([3, 2, 1], np.float32).reshape(1, 3, 1)
    chain = jnp.arange(-1, 7, dtype=jnp.int32)[None]
    window = replay_gather_index(chain, jnp.array([accepted], jnp.int32), 4)
    got = replay_conv_state(jnp.asarray(inputs), jnp.asarray(before), window)
    all_inputs = [-3, -2, -1, *range(1, accepted + 2)]
    assert got[0, :, 0].tolist() == all_inputs[-3:]


def test_the_documented_window():
    parents = jnp.array([[-1, 0, 0, 1, 1, 2]], jnp.int32)
    window = conv_gather_index(parents, 4)[0]
    assert window[0].tolist() == [0, 1, 2, 3]
    assert window[2].tolist() == [1, 2, 3, 5]
    assert window[5].tolist() == [2, 3, 5, 8]


@pytest.mark.parametrize("implementation", ON_CPU_AND_GPU)
def test_masking_comes_before_exp(implementation):
    """A sibling's exponent is +200 here, past float32's exp; it must not even turn into inf * 0."""
    parents = np.array([[-1, 0, 0]])
    shape = (1, 3, 1, 16)
    ones = jnp.ones(shape)
    dt = jnp.array([0.1, 200.0, 0.1]).reshape(1, 3, 1)
    y = tree_scan(
        ones,
        dt,
        -jnp.ones(1),
        ones,
        ones,
        jnp.zeros((1, 16)),
        jnp.ones((1, 1, 16, 16)),
        jnp.asarray(np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)),
        implementation=implementation,
    )
    truth, _ = scan_reference.tree_scan(
        np.ones(shape),
        np.asarray(dt, np.float64),
        -np.ones(1),
        np.ones(shape),
        np.ones(shape),
        np.zeros((1, 16)),
        np.ones((1, 1, 16, 16)),
        parents,
    )
    np.testing.assert_allclose(y, truth, rtol=1e-5)
