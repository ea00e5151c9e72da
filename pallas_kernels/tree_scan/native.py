"""The scans by our own code, `native.cc`: a head's state is read once and written once."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.numerics import DeferredRMSNorm


def scan(
    previous: Any, tree: Any, A: jax.Array, state: jax.Array, gate: Any, *, A_is_log: bool
) -> tuple[Any, jax.Array]:
    """See `api._run`, whose arrays these are; a tree that is not there has no nodes."""
    replays = previous is not None
    x, dt, B, *_ = tree or previous
    no_x, no_dt, no_B, no_path = _no_tree(x, dt, B)
    x, dt, B, C, D, mask = tree or (
        *(no_x, no_dt, no_B, no_B),
        jnp.zeros(x.shape[2], jnp.float32),
        jnp.zeros((len(x), 0, 0), bool),
    )
    batch, queries = C.shape[:2]
    defers = gate is not None and gate.defers_norm
    has_norm = gate is not None and gate.norm_weight is not None
    kind = (gate is not None) + has_norm + (has_norm and not defers)
    results = [
        jax.ShapeDtypeStruct((batch, queries, *x.shape[2:]), jnp.float32),
        jax.ShapeDtypeStruct((batch, queries, x.shape[2]) if defers else (0,), jnp.float32),
    ]
    if replays:
        results.append(jax.ShapeDtypeStruct(state.shape, jnp.float32))
    y, mean_squares, *new_state = native.call(
        "replay_tree_scan" if replays else "tree_scan",
        results,
        *(previous or (no_x, no_dt, no_B, no_path)),
        *(x, dt, A, B, C, D, state, mask),
        None if gate is None else gate.projected.astype(jnp.float32),
        gate.norm_weight.astype(jnp.float32) if has_norm else None,
        aliases={10: 2} if replays else {},
        a_is_log=int(A_is_log),
        gate=kind,
        start=0 if gate is None else gate.start,
        multiplier=float(1 if gate is None else gate.multiplier),
        epsilon=float(0 if gate is None else gate.norm_epsilon),
    )
    (state,) = new_state or (state,)
    if defers:
        rows = y.reshape(batch, queries, x.shape[2] * x.shape[3])
        y = DeferredRMSNorm(rows, mean_squares, gate.norm_epsilon)
    return None if tree is None else y, state


def ssd(*arguments: Any, A_is_log: bool) -> tuple[Any, jax.Array]:
    """See `ssd.api.ssd`, whose arrays and gate these are: a tree of nodes without a mask."""
    x, dt, A, B, C, D, state, gate = arguments
    tree = (x, dt, B, C, D, jnp.zeros(0, bool))
    return scan(_no_tree(x, dt, B), tree, A, state, gate, A_is_log=A_is_log)


def _no_tree(x: jax.Array, dt: jax.Array, B: jax.Array) -> tuple[jax.Array, ...]:
    """The record and path of a previous tree without nodes."""
    return x[:, :0], dt[:, :0], B[:, :0], jnp.zeros((len(x), 0), bool)
