"""Native scans and delta rules: what their tables do not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pallas_kernels import delta_chunks, replay_tree_delta, replay_tree_scan
from tests.cases import tree_delta as deltas
from tests.cases import tree_scan as scans
from tests.cases.base import NEEDS_NATIVE

pytestmark = NEEDS_NATIVE


# The state is the last argument but one, the new one the last result.
UPDATES = {
    replay_tree_scan: scans.arguments(replay_tree_scan, scans.CASES["tree"]),
    replay_tree_delta: deltas.arguments(replay_tree_delta, deltas.CASES["tree"]),
    delta_chunks: deltas.arguments(delta_chunks, deltas.CASES["tree"]),
}


@pytest.mark.parametrize("op", UPDATES)
def test_the_state_is_updated_in_place_only_if_it_is_donated(op):
    run, given = functools.partial(op, implementation="native"), UPDATES[op]
    at = len(given) - 2
    kept = np.asarray(given[at]).copy()
    want = jax.jit(run)(*given)[-1]
    assert_array_equal(given[at], kept)
    donated = jax.jit(run, donate_argnums=at)(*given[:at], jnp.array(kept), given[-1])[-1]
    assert_array_equal(donated, want)


@pytest.mark.parametrize("op", UPDATES)
def test_vmap(op):
    run, given = functools.partial(op, implementation="native"), UPDATES[op]
    several = jax.vmap(run)(*(jnp.stack([each, each]) for each in given))
    for one, two in zip(run(*given), several, strict=True):
        assert_array_equal(two, np.stack([one, one]))
