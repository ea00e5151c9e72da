"""The scans by our own code, `native.cc`: a head's state is read once and written once."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.numerics import DeferredRMSNorm


def tree_scan(*arguments: Any, A_is_log: bool = False) -> jax.Array | DeferredRMSNorm:
    """See `api.tree_scan`, whose arrays and gate these are."""
    return _run("tree_scan", *_no_tree(*arguments[:4]), *arguments, A_is_log)[0]


def replay_tree_scan(
    *arguments: Any, A_is_log: bool = False
) -> tuple[jax.Array | DeferredRMSNorm, jax.Array]:
    """See `api.replay_tree_scan`, whose arrays and gate these are."""
    y, state = _run("replay_tree_scan", *arguments, A_is_log)
    return y, state


def replay(*arrays: jax.Array, A_is_log: bool = False) -> jax.Array:
    """See `api.replay`, whose arrays these are: the same, with a new tree of no nodes."""
    x, dt, A, B, state, path = arrays
    batch, _, heads, _ = x.shape
    nothing = x[:, :0], dt[:, :0], A, B[:, :0], B[:, :0], jnp.zeros(heads, jnp.float32)
    no_mask = jnp.zeros((batch, 0, 0), bool)
    previous = x, dt, B, path
    return _run("replay_tree_scan", *previous, *nothing, state, no_mask, None, A_is_log)[1]


def ssd(*arguments: Any, A_is_log: bool = False) -> tuple[jax.Array | DeferredRMSNorm, jax.Array]:
    """See `ssd.api.ssd`, whose arrays and gate these are: the same, of nodes without a mask."""
    x, dt, A, B, *others, gate = arguments
    nodes = x, dt, A, B, *others, jnp.zeros(0, bool), gate
    y, state = _run("replay_tree_scan", *_no_tree(x, dt, A, B), *nodes, A_is_log)
    return y, state


def _no_tree(x: jax.Array, dt: jax.Array, _: Any, B: jax.Array) -> tuple[jax.Array, ...]:
    """The record and path of a previous tree without nodes."""
    return x[:, :0], dt[:, :0], B[:, :0], jnp.zeros((len(x), 0), bool)


def _run(name: str, *arguments: Any) -> tuple[Any, ...]:
    """The outputs, and the state if one is replayed."""
    *arrays, gate, A_is_log = arguments
    x, C, state = arrays[4], arrays[8], arrays[10]
    batch, queries = C.shape[:2]
    defers = gate is not None and gate.defers_norm
    has_norm = gate is not None and gate.norm_weight is not None
    kind = (gate is not None) + has_norm + (has_norm and not defers)
    results = [
        jax.ShapeDtypeStruct((batch, queries, *x.shape[2:]), jnp.float32),
        jax.ShapeDtypeStruct((batch, queries, x.shape[2]) if defers else (0,), jnp.float32),
    ]
    if name == "replay_tree_scan":
        results.append(jax.ShapeDtypeStruct(state.shape, jnp.float32))
    y, mean_squares, *new_state = native.call(
        name,
        results,
        *arrays,
        None if gate is None else gate.projected.astype(jnp.float32),
        gate.norm_weight.astype(jnp.float32) if has_norm else None,
        aliases={10: 2} if name == "replay_tree_scan" else {},
        a_is_log=int(A_is_log),
        gate=kind,
        start=0 if gate is None else gate.start,
        multiplier=float(1 if gate is None else gate.multiplier),
        epsilon=float(0 if gate is None else gate.norm_epsilon),
    )
    if defers:
        rows = y.reshape(batch, queries, x.shape[2] * x.shape[3])
        y = DeferredRMSNorm(rows, mean_squares, gate.norm_epsilon)
    return y, *new_state
