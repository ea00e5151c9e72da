"""The gated delta rule: what its table does not say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import delta_chunks, replay_delta, tree_delta
from pallas_kernels.tree_delta import reference, xla
from tests.cases import tree_delta as table
from tests.cases.base import NEEDS_NATIVE, assert_finite, relative_error

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


def arguments(case=CASE):
    """Arguments of a tree of which all nodes are queries."""
    given = table.on_device(case, table.inputs(case))
    return [*table.named(given, table.TREE[:-1]), given.mask]


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
    *given, mask = arguments(case)
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
    q, k, v, g, beta, state, mask = arguments(case)
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


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17, 33, 64])
def test_the_inverse_of_any_size(count):
    """Of a system whose series of powers has terms of 1e18 at 64 rows: all of it is 1."""
    ones = np.tril(np.ones((1, 2, count, count)), -1)
    ones[:, 1] *= np.random.default_rng(0).uniform(0.9, 1.0, size=ones.shape[2:])
    found = xla.inverse(jnp.asarray(ones, jnp.float32))
    assert relative_error(found, np.linalg.inv(np.eye(count) + ones)) < 3e-7


def one_by_one(q, k, v, g, beta, state):
    """`delta_chunks` as a scan over positions, with the plain recurrence's derivatives."""
    each = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(xla.normed(x), each, axis=2) for x in (q * 1.0, k * 1.0))

    def step(state, now):
        q, k, v, g, beta = now
        state = jnp.exp(g)[..., None, None] * state
        u = beta[..., None] * (v - jnp.einsum("bhps,bhs->bhp", state, k))
        state = state + u[..., None] * k[..., None, :]
        return state, jnp.einsum("bhps,bhs->bhp", state, q) * q.shape[-1] ** -0.5

    state, y = lax.scan(step, state, [x.swapaxes(0, 1) for x in (q, k, v, g, beta)])
    return y.swapaxes(0, 1), state


def gradients(function, given):
    def total(given):
        y, state = function(*given)
        return jnp.sum(y**3) + jnp.sum(state**3)

    return jax.jit(jax.grad(total))(tuple(given))


@pytest.mark.parametrize("name", ["tree", "betas to 2", "decays of -100 among 0", "equal keys"])
def test_gradients_are_those_of_the_recurrence(name):
    case = table.CASES[name].but(nodes=21, batch=1, shape="random")
    given = table.named(table.on_device(case, table.inputs(case)), table.TREE[:-1])
    valid = jnp.ones((1, case.nodes), bool)
    run = functools.partial(delta_chunks, valid=valid, chunk_size=8)
    for one, other in zip(gradients(run, given), gradients(one_by_one, given), strict=True):
        assert relative_error(one, other) < 5e-6


def test_gradients_are_finite_where_positions_hold_nan():
    case = table.CASES["padded nodes"]
    given = table.on_device(case, table.inputs(case))
    arrays = table.named(given, table.TREE[:-1])
    of_sequence = gradients(
        functools.partial(delta_chunks, valid=given.valid, chunk_size=8), arrays
    )
    of_tree = gradients(lambda *arrays: tree_delta(*arrays, given.mask), arrays)
    for gradient in (*of_sequence, *of_tree):
        assert_finite(gradient)
