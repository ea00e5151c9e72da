"""Convolutions and scans of trees: the documented index arithmetic, and random trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import replay_conv_state
from pallas_kernels.tree_conv1d import reference
from tests.cases.base import conv_gather_index, replay_gather_index
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
