"""Ops of trees: what their tables do not say."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import replay_delta, tree_delta
from pallas_kernels.tree_delta import reference as delta
from tests.cases import tree_delta as deltas
from tests.cases.base import MARKS, relative_error


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS.get(n, ())) for n in ("xla", "native", "pallas_interpret")]
)
def test_many_steps_of_the_delta_rule_do_not_drift(name):
    """Replay after replay, each of a tree from the state that the last one left."""
    run = jax.jit(functools.partial(tree_delta, implementation=name))
    replayed, case = jax.jit(replay_delta), deltas.CASES["tree"]
    i = deltas.inputs(case)
    given, state, true = deltas.on_device(case, i), jnp.asarray(i.state, jnp.float32), i.state
    for turn in range(20):
        path = i.mask[:, turn % case.nodes]
        _, u = run(*deltas.named(given, deltas.TREE[:5]), state, given.mask)
        state = replayed(given.k, u, given.g, state, jnp.asarray(path))
        _, u, _ = delta.tree_delta(*deltas.named(i, deltas.TREE[:5]), true, i.parents)
        true = delta.replay_delta(i.k, u, i.g, true, path)
    assert relative_error(state, true) < 3e-7
