"""The gated delta rule: what its table does not say."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import replay_delta, tree_delta
from pallas_kernels.tree_delta import reference
from tests.cases import tree_delta as table
from tests.cases.base import NEEDS_NATIVE, relative_error

CASE = table.CASES["tree"]
replayed = jax.jit(replay_delta)
of_each_version = pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            jax.jit(functools.partial(tree_delta, implementation=name)), id=name, marks=marks
        )
        for name, marks in {"xla": (), "native": NEEDS_NATIVE, "pallas_interpret": ()}.items()
    ],
)


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
