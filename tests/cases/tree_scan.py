"""`tree_scan`, `replay` and `replay_tree_scan` on one table, which convolutions share."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, replay, replay_tree_scan, tree_scan
from pallas_kernels.tree_scan import reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

SIZES = dict(
    batch=2,
    nodes=13,
    replayed=6,  # nodes of the tree before
    queries=None,  # None: all nodes
    heads=4,
    head_dim=16,
    state=16,
    padded=0,  # nodes at the end that do not exist
)
CASES = base.table(
    {
        "root only": dict(nodes=1, replayed=1),
        "two nodes": dict(nodes=2, groups=2, width=3),
        "tree": {},
        "newest level": dict(queries=3, width=7),
        "newest node of many": dict(nodes=40, queries=1, heads=2),
        "groups": dict(groups=2, head_dim=32),
        "a group a head": dict(groups=4, width=2),
        "padded nodes": dict(padded=5, replayed=17),
        "blocks of nodes": dict(nodes=70, batch=1, heads=2),
        "one row": dict(batch=1, state=32),
        "three rows, one with an empty path": dict(batch=3, nodes=5),
        "large time steps": dict(dt_scale=100.0),
        "tiny time steps": dict(dt_scale=1e-4),
        "bf16": dict(bf16=True),
        "bf16, many nodes": dict(nodes=70, replayed=70, batch=1, heads=2, bf16=True),
        "to the bit": dict(padded=5, replayed=17, queries=8, to_the_bit=True),
    },
    **dict(SIZES, groups=1, width=4, dt_scale=1.0, to_the_bit=False),
)


@functools.cache
def inputs(case, seed=0):
    """Exact float64 inputs; a row's path ends at `last`, -1: it is empty."""
    rng, draw = base.drawn(case, seed)
    exact = functools.partial(draw, dtype=np.float32)
    batch, nodes, heads, size = case.batch, case.nodes, case.heads, case.head_dim
    parents = base.random_parents(rng, batch, nodes)
    mask = base.ancestor_mask(parents) & (np.arange(nodes) < nodes - case.padded)
    softplus = np.log1p(np.exp(exact(batch, nodes, heads))) * case.dt_scale
    channels = heads * size + 2 * case.groups * case.state
    return SimpleNamespace(
        x=draw(batch, nodes, heads, size),
        dt=softplus.astype(np.float32).astype(np.float64),
        A=-np.exp(exact(heads)).astype(np.float32).astype(np.float64),
        B=draw(batch, nodes, case.groups, case.state),
        C=draw(batch, nodes, case.groups, case.state),
        D=exact(heads, size),
        state=exact(batch, heads, size, case.state),
        conv_input=draw(batch, nodes, channels),
        conv_state=draw(batch, case.width - 1, channels),
        conv_weight=draw(case.width, channels),
        conv_bias=draw(channels),
        parents=parents,
        mask=mask,
        **base.accepted(case, mask),
    )


def previous(case):
    """Inputs of the tree before, and the path that was accepted in it."""
    return inputs(case.but(nodes=case.replayed, padded=0), seed=1)


def on_device(case, values):
    """The inputs in the types that models have them in; the C of the queries alone."""
    kinds = dict.fromkeys(("dt", "A", "D", "state"), jnp.float32)
    kinds |= dict.fromkeys(("x", "B", "C"), case.kind) | dict.fromkeys(("mask", "path"))
    found = {name: base.on_device(getattr(values, name), kind) for name, kind in kinds.items()}
    first = case.nodes - (case.queries or case.nodes)
    return SimpleNamespace(**found | {"C": found["C"][:, first:]})


def named(values, names):
    return [getattr(values, name) for name in names]


REPLAYED, SCANNED = ("x", "dt", "B", "path"), ("x", "dt", "A", "B", "C", "D", "state", "mask")
REFERENCE = (*SCANNED[:-1], "parents")


def output_error(case, y, truth):
    """Of the queries that exist. The others are finite."""
    assert y.dtype == case.kind
    base.assert_finite(y)
    first = case.nodes - (case.queries or case.nodes)
    exists = slice(first, case.nodes - case.padded)
    return relative_error(y[:, : exists.stop - first], truth[:, exists])


def state_error(state, truth, values, last):
    """Rows with an empty path keep their state exactly."""
    assert state.dtype == jnp.float32
    for row in np.flatnonzero(last < 0):
        np.testing.assert_array_equal(state[row], values.state[row])
    return relative_error(state, truth)


def arguments(op, case):
    """What `tree_scan` or `replay_tree_scan` takes by position."""
    given = named(on_device(case, inputs(case)), SCANNED)
    if op is tree_scan:
        return given
    return [*named(on_device(case.but(queries=None), previous(case)), REPLAYED), *given]


@functools.cache
def scan_errors(case, implementation):
    values = inputs(case)
    run = jax.jit(functools.partial(tree_scan, implementation=implementation))
    with dispatch.to_the_bit(case.to_the_bit):
        y = run(*arguments(tree_scan, case))
    truth, _ = reference.tree_scan(*named(values, REFERENCE))
    return {"y": output_error(case, y, truth)}


@functools.cache
def replay_errors(case, implementation):
    values, names = inputs(case), ("x", "dt", "A", "B", "state", "path")
    run = jax.jit(functools.partial(replay, implementation=implementation))
    state = run(*named(on_device(case, values), names))
    truth = reference.replay(*named(values, names))
    return {"state": state_error(state, truth, values, values.last)}


@functools.cache
def fused_errors(case, implementation):
    values, before = inputs(case), previous(case)
    run = jax.jit(functools.partial(replay_tree_scan, implementation=implementation))
    with dispatch.to_the_bit(case.to_the_bit):
        y, state = run(*arguments(replay_tree_scan, case))
    true_y, true_state = reference.replay_tree_scan(
        *named(before, REPLAYED), *named(values, REFERENCE)
    )
    return {
        "y": output_error(case, y, true_y),
        "state": state_error(state, true_state, values, before.last),
    }


def replay_budgets(case):
    return {"state": Budget(base.STATE[case.bf16])}


def small_replay(state_size=16):
    """A call of jax-triton's kernel without a case: two nodes, one head."""
    x, dt = jnp.ones((1, 2, 1, 16)), jnp.ones((1, 2, 1))
    B = jnp.ones((1, 2, 1, state_size))
    state = jnp.zeros((1, 1, 16, state_size))
    return replay(
        x, dt, -jnp.ones(1), B, state, jnp.ones((1, 2), bool), implementation="jax_triton"
    )


# `tree_scan` and `replay` are the same kernel without one of its halves, so that they run the other
# cases: these have trees of different sizes, several blocks, and states that both halves use.
FUSED = (
    *("root only", "newest level", "groups", "padded nodes", "blocks of nodes"),
    *("three rows, one with an empty path", "large time steps", "bf16, many nodes"),
    "to the bit",
)
TREE_SCAN = Op(
    *(CASES, scan_errors, base.of_steps, base.WITH_NATIVE), slow=FUSED, lacks=base.native_lacks_bf16
)
# A replay has no queries.
REPLAY = Op(CASES, replay_errors, replay_budgets, slow=(*FUSED, "newest node of many"))
REPLAY_TREE_SCAN = Op(
    {name: CASES[name] for name in FUSED},
    fused_errors,
    lambda case: base.of_steps(case) | replay_budgets(case),
    base.WITH_NATIVE,
    lacks=base.native_lacks_bf16,
)
