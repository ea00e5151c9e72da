"""The native scan and convolution: what their tables do not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native, replay_tree_scan, tree_scan
from tests.cases import tree_scan as table
from tests.cases.base import NEEDS_NATIVE

pytestmark = NEEDS_NATIVE
CASE = table.CASES["tree"]
SCAN = functools.partial(tree_scan, implementation="native")
FUSED = functools.partial(replay_tree_scan, implementation="native")


def arguments(case=CASE):
    return table.named(table.on_device(case, table.inputs(case)), table.SCANNED)


def fused_arguments(case=CASE):
    before = table.on_device(case.but(queries=None), table.previous(case))
    return [*table.named(before, table.REPLAYED), *arguments(case)]


def test_a_node_is_the_same_to_the_bit_in_any_tree():
    """A path of a tree as a chain, and each level alone: nothing depends on other nodes."""
    x, dt, A, B, C, D, state, mask = arguments()
    whole = np.asarray(SCAN(x, dt, A, B, C, D, state, mask))
    path = np.flatnonzero(np.asarray(mask)[0, -1])
    chain = jnp.tril(jnp.ones((1, len(path), len(path)), bool))
    nodes = x[:1, path], dt[:1, path], A, B[:1, path], C[:1, path], D, state[:1]
    np.testing.assert_array_equal(np.asarray(SCAN(*nodes, chain))[0], whole[0, path])
    newest = SCAN(x, dt, A, B, C[:, -3:], D, state, mask)
    np.testing.assert_array_equal(np.asarray(newest), whole[:, -3:])


def test_the_state_is_updated_in_place_only_if_it_is_donated():
    given = fused_arguments()
    state = given[10]
    kept = np.asarray(state).copy()
    want = jax.jit(FUSED)(*given)[1]
    np.testing.assert_array_equal(np.asarray(state), kept)
    donated = jax.jit(FUSED, donate_argnums=10)(*given[:10], jnp.array(kept), given[11])[1]
    np.testing.assert_array_equal(np.asarray(donated), np.asarray(want))


def test_vmap():
    given = fused_arguments()
    alone = FUSED(*given)
    several = jax.vmap(FUSED)(*(jnp.stack([each, each]) for each in given))
    for one, two in zip(alone, several, strict=True):
        np.testing.assert_array_equal(np.asarray(two), np.stack([one, one]))


WRONG = {
    "fewer time steps": (5, lambda array: array[:, :-1]),
    "a state of fewer channels": (10, lambda array: array[:, :, :-1]),
    "another mask": (11, lambda array: array[:, :-1]),
    "more groups than heads": (7, lambda array: jnp.concatenate([array] * 3, axis=2)),
    "a path of another tree": (3, lambda array: array[:, :-1]),
    "15 states": (8, lambda array: array[..., :-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sizes_are_errors(name):
    """The function refuses what the op's own checks let pass, and reads nothing."""
    which, change = WRONG[name]
    given = fused_arguments()
    given[which] = change(given[which])
    none, y = jnp.zeros(0), jax.ShapeDtypeStruct(arguments()[0].shape, jnp.float32)
    results = [y, jax.ShapeDtypeStruct((0,), jnp.float32)]
    results.append(jax.ShapeDtypeStruct(given[10].shape, jnp.float32))
    settings = dict(a_is_log=0, gate=0, start=0, multiplier=np.float32(1), epsilon=np.float32(0))
    with pytest.raises(Exception, match="shapes do not fit"):
        jax.block_until_ready(
            native.call("replay_tree_scan", results, *given, none, none, **settings)
        )
