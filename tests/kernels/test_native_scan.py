"""Native scans and delta rules: what their tables do not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_chunks, replay_tree_delta, replay_tree_scan
from tests.cases import tree_delta as deltas
from tests.cases import tree_scan as scans
from tests.cases.base import NEEDS_NATIVE

pytestmark = NEEDS_NATIVE


def scanned():
    case = scans.CASES["tree"]
    return scans.named(scans.on_device(case, scans.inputs(case)), scans.SCANNED)


def delta_of(mask="mask"):
    case = deltas.CASES["tree"]
    given = deltas.on_device(case, deltas.inputs(case))
    return deltas.named(given, (*deltas.TREE[:-1], mask))


def scanned_after():
    case = scans.CASES["tree"]
    before = scans.on_device(case.but(queries=None), scans.previous(case))
    return [*scans.named(before, scans.REPLAYED), *scanned()]


def delta_after():
    case = deltas.CASES["tree"]
    before = deltas.on_device(case, deltas.previous(case), deltas.truth_before(case)[1])
    return [*deltas.named(before, (*deltas.RECORD, "path")), *delta_of()]


# The state is the last argument but one, the new one the last result.
UPDATES = [
    pytest.param(replay_tree_scan, scanned_after, id="replay_tree_scan"),
    pytest.param(replay_tree_delta, delta_after, id="replay_tree_delta"),
    pytest.param(delta_chunks, functools.partial(delta_of, "valid"), id="delta_chunks"),
]


@pytest.mark.parametrize(("op", "arguments"), UPDATES)
def test_the_state_is_updated_in_place_only_if_it_is_donated(op, arguments):
    run, given = functools.partial(op, implementation="native"), arguments()
    at = len(given) - 2
    kept = np.asarray(given[at]).copy()
    want = jax.jit(run)(*given)[-1]
    np.testing.assert_array_equal(given[at], kept)
    donated = jax.jit(run, donate_argnums=at)(*given[:at], jnp.array(kept), given[-1])[-1]
    np.testing.assert_array_equal(donated, want)


@pytest.mark.parametrize(("op", "arguments"), UPDATES)
def test_vmap(op, arguments):
    run, given = functools.partial(op, implementation="native"), arguments()
    several = jax.vmap(run)(*(jnp.stack([each, each]) for each in given))
    for one, two in zip(run(*given), several, strict=True):
        np.testing.assert_array_equal(two, np.stack([one, one]))
