"""Native scans and delta rules: what their tables do not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_chunks, replay_tree_delta, replay_tree_scan, tree_delta, tree_scan
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


def newest_scanned(run, given, whole):
    """The last nodes alone are queries."""
    return run(*given[:4], given[4][:, -3:], *given[5:])


def newest_delta(run, given, whole):
    q, k, v, g, beta, *rest = given
    v, beta = v[:, -3:], beta[:, -3:]
    return run(q[:, -3:], k, v, g, beta, *rest, prefix_u=whole[1][:, :-3])[0]


# With the places of what each node has, and a function.
TREES = [
    pytest.param(tree_scan, scanned, (0, 1, 3, 4), newest_scanned, id="tree_scan"),
    pytest.param(tree_delta, delta_of, (0, 1, 2, 3, 4), newest_delta, id="tree_delta"),
]
# The state is the last argument but one, the new one the last result.
UPDATES = [
    pytest.param(replay_tree_scan, scanned_after, id="replay_tree_scan"),
    pytest.param(replay_tree_delta, delta_after, id="replay_tree_delta"),
    pytest.param(delta_chunks, functools.partial(delta_of, "valid"), id="delta_chunks"),
]


@pytest.mark.parametrize(("op", "arguments", "of_nodes", "newest"), TREES)
def test_a_node_is_the_same_to_the_bit_in_any_tree(op, arguments, of_nodes, newest):
    """A path of a tree as a chain, and its last nodes alone: nothing depends on other nodes."""
    run, given = functools.partial(op, implementation="native"), arguments()
    whole, mask = jax.tree.leaves(run(*given)), given[-1]
    path = np.flatnonzero(np.asarray(mask)[0, -1])
    nodes = [x[:1, path] if at in of_nodes else x for at, x in enumerate(given)]
    chain = jnp.tril(jnp.ones((1, len(path), len(path)), bool))
    alone = jax.tree.leaves(run(*nodes[:-2], given[-2][:1], chain))
    for one, other in zip(alone, whole, strict=True):
        np.testing.assert_array_equal(one[0], other[0, path])
    np.testing.assert_array_equal(newest(run, given, whole), whole[0][:, -3:])


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
