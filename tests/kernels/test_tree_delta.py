"""The gated delta rule: what its table does not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import replay_delta, tree_delta
from pallas_kernels.tree_delta import reference
from tests.cases import tree_delta as table
from tests.cases.base import NEEDS_NATIVE, relative_error

CASE = table.CASES["tree"]
replayed = jax.jit(replay_delta)
run = jax.jit(functools.partial(tree_delta, implementation="xla"))
run_native = jax.jit(functools.partial(tree_delta, implementation="native"))
run_kernel = jax.jit(functools.partial(tree_delta, implementation="pallas_interpret"))
RUNS = [
    pytest.param(run, id="xla"),
    pytest.param(run_native, id="native", marks=NEEDS_NATIVE),
    pytest.param(run_kernel, id="pallas_interpret"),
]
of_each_version = pytest.mark.parametrize("run", RUNS)


def test_the_reference_is_the_published_recurrence():
    """S <- exp(g) S (I - beta k k^T) + beta v k^T, along each path from the root on."""
    i = table.inputs(CASE)
    y, u, states = table.truth(CASE)
    each = CASE.heads // CASE.groups
    for b, node, h in np.ndindex(CASE.batch, CASE.nodes, CASE.heads):
        S, path = i.state[b, h], np.flatnonzero(i.mask[b, node])
        for j in path:
            k = i.k[b, j, h // each] / np.sqrt((i.k[b, j, h // each] ** 2).sum() + 1e-6)
            kept = np.exp(i.g[b, j, h]) * (np.eye(len(k)) - i.beta[b, j, h] * np.outer(k, k))
            S = S @ kept + i.beta[b, j, h] * np.outer(i.v[b, j, h], k)
        q = i.q[b, node, h // each] / np.sqrt((i.q[b, node, h // each] ** 2).sum() + 1e-6)
        np.testing.assert_allclose(states[b, node, h], S, atol=1e-13)
        np.testing.assert_allclose(y[b, node, h], S @ q / np.sqrt(CASE.state), atol=1e-13)
    after = reference.replay_delta(i.k, u, i.g, i.state, i.mask[:, -1])
    np.testing.assert_allclose(after, states[:, -1], atol=1e-13)


@of_each_version
def test_every_wrong_ancestor_is_found(run):
    """A sibling that leaks in changes its own node, those below it, and no other.

    Native code reads the parent alone, the last ancestor: other wrong ones change nothing there.
    """
    case = CASE.but(batch=1)
    *given, mask = table.arguments(tree_delta, case)
    right = np.asarray(mask[0])
    pairs = np.argwhere(np.tril(~right))  # a node and an earlier one that is not above it
    assert len(pairs) > 40
    masks = np.repeat(right[None], len(pairs), axis=0)
    masks[np.arange(len(pairs)), pairs[:, 0], pairs[:, 1]] = True
    given = [jnp.broadcast_to(x, (len(pairs), *x.shape[1:])) for x in given]
    y, u = (np.asarray(x) for x in run(*given, jnp.asarray(masks)))
    same_y, same_u = (np.asarray(x) for x in run(*given, jnp.broadcast_to(mask, masks.shape)))
    for pair, (node, wrong) in enumerate(pairs):
        true_y, true_u, _ = table.truth(case)
        if run is run_native and wrong < np.flatnonzero(right[node])[:-1].max(initial=-1):
            np.testing.assert_array_equal(y[pair], same_y[pair])
            continue
        assert relative_error(y[pair, node], true_y[0, node]) > 1e-3
        assert relative_error(u[pair, node], true_u[0, node]) > 1e-3
        others = ~right[:, node]
        np.testing.assert_array_equal(y[pair, others], same_y[pair, others])
        np.testing.assert_array_equal(u[pair, others], same_u[pair, others])


@of_each_version
def test_a_tree_that_grows_is_the_tree(run):
    """As deep trees of draft models do: nodes of a call are siblings, after slots for all nodes."""
    case, first = CASE.but(batch=1, shape="levels"), 0
    q, k, v, g, beta, state, mask = table.arguments(tree_delta, case)
    outputs, u = [], jnp.full(v.shape, jnp.nan)
    for size in (1, 3, 4, 5):
        new, done = slice(first, first + size), jnp.arange(case.nodes) < first
        above = jnp.concatenate([mask, mask[:, new]], axis=1) & done
        own = jnp.pad(jnp.eye(size, dtype=bool), ((case.nodes, 0), (0, 0)))
        tree = jnp.concatenate([above, own[None]], axis=2)
        keys, decays = (
            jnp.concatenate([jnp.where(done.reshape(-1, *rest), x, jnp.nan), x[:, new]], axis=1)
            for x, rest in ((k, (1, 1)), (g, (1,)))
        )
        y, record = run(q[:, new], keys, v[:, new], decays, beta[:, new], state, tree, prefix_u=u)
        outputs.append(y)
        u = u.at[:, new].set(record[:, -size:])
        first += size
    true_y, true_u, states = table.truth(case)
    assert relative_error(jnp.concatenate(outputs, axis=1), true_y) < 3e-7
    assert relative_error(u, true_u) < 3e-7
    assert relative_error(replayed(k, u, g, state, mask[:, -1]), states[:, -1]) < 3e-7


@of_each_version
def test_many_steps_do_not_drift(run):
    """Replay after replay, each of a tree from the state that the last one left."""
    i = table.inputs(CASE)
    state, true = jnp.asarray(i.state, jnp.float32), i.state
    given = table.on_device(CASE, i)
    for turn in range(20):
        path = i.mask[:, turn % CASE.nodes]
        arrays = table.named(given, table.TREE[:5])
        _, u = run(*arrays, state, given.mask)
        state = replayed(given.k, u, given.g, state, jnp.asarray(path))
        _, u, _ = reference.tree_delta(*table.named(i, table.TREE[:5]), true, i.parents)
        true = reference.replay_delta(i.k, u, i.g, true, path)
    assert relative_error(state, true) < 3e-7
