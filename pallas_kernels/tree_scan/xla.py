"""The scans in closed form (STree, equation 6 and after), with XLA's own matrix products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import (
    DeferredRMSNorm,
    batched_product,
    contract,
    rms_norm,
    scaled,
    total,
)
from pallas_kernels.rms_norm.xla import activated
from pallas_kernels.tree_scan.gate import Gate


def tree_scan(*arguments: Any, A_is_log: bool = False) -> jax.Array | DeferredRMSNorm:
    """See `api.tree_scan`, whose arrays and gate these are."""
    x, dt, A, B, C, D, state, mask, *some_gate = arguments
    A = rates(A, A_is_log)
    batch, num_nodes, num_heads, head_dim = x.shape
    num_queries, num_groups = C.shape[1:3]
    first_query = num_nodes - num_queries
    dtype, x = x.dtype, x.astype(jnp.float32)
    B, C = (v.astype(jnp.float32).transpose(0, 2, 1, 3) for v in (B, C))  # groups first

    # 1. Log-decay of every node, accumulated along its path. [B, N, H]
    decay = contract("bij,bjh->bih", mask.astype(jnp.float32), dt * A[None, None])
    query_decay = decay[:, first_query:]

    # 2. Weight of node j in query i. Masked before exp: the exponent of a node that is no
    #    ancestor can be positive and overflow. [B, H, Q, N]
    exponent = query_decay.transpose(0, 2, 1)[..., None] - decay.transpose(0, 2, 1)[:, :, None]
    exponent = jnp.where(mask[:, None, first_query:], exponent, -jnp.inf)
    weight = jnp.exp(exponent) * dt.transpose(0, 2, 1)[:, :, None]

    # 3. Scores C_i . B_j are shared by the heads of a group.
    scores = batched_product(C, B, transpose_right=True)[:, :, None]
    weight = (weight.reshape(batch, num_groups, -1, *weight.shape[2:]) * scores).reshape(
        weight.shape
    )
    y = batched_product(weight, x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    # 4. The state before the root, decayed to the query.
    carried = batched_product(
        C, state.reshape(batch, num_groups, -1, state.shape[-1]), transpose_right=True
    )
    carried = carried.reshape(batch, num_groups, num_queries, -1, head_dim)
    carried = carried.transpose(0, 2, 1, 3, 4).reshape(y.shape)
    y = y + carried * jnp.exp(query_decay)[..., None]

    y = (y + D.reshape(1, 1, num_heads, -1) * x[:, first_query:]).astype(dtype)
    gate = some_gate[0] if some_gate else None
    return y if gate is None else gated(y, gate)


def replay(*arrays: jax.Array, A_is_log: bool = False) -> jax.Array:
    """See `api.replay`, whose arrays these are. One contraction over the nodes."""
    x, dt, A, B, state, path = arrays
    x, B = x.astype(jnp.float32), B.astype(jnp.float32)
    dt = jnp.where(path[..., None], dt, 0.0)
    weight, total = to_the_end(dt * rates(A, A_is_log)[None, None])
    return advanced(total[..., None, None] * state, B, x * (weight * dt)[..., None])


def to_the_end(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The decay from just after each node to the end `[B, N, H, ...]`, and that of the state.

    Log-decays g are 0 off the path. Sums over the later nodes, summed directly: the difference of
    two cumulative sums cancels (1e-5 at 128 nodes with large dt; this 3e-8).
    """
    later = jnp.concatenate([g[:, 1:], jnp.zeros_like(g[:, :1])], axis=1)
    return jnp.exp(lax.cumsum(later, axis=1, reverse=True)), jnp.exp(g.sum(axis=1))


def advanced(state: jax.Array, k: jax.Array, u: jax.Array) -> jax.Array:
    """The state after all nodes, with it and u `[B, N, H, P]` decayed to the end of the path."""
    grouped = u.reshape(*k.shape[:3], -1, u.shape[-1])
    written = contract("bjgkp,bjgs->bgkps", grouped, k)
    return state + written.reshape(state.shape)


def replay_tree_scan(
    *arguments: Any, A_is_log: bool = False
) -> tuple[jax.Array | DeferredRMSNorm, jax.Array]:
    """See `api.replay_tree_scan`, whose arrays and gate these are. One after the other."""
    prev_x, prev_dt, prev_B, prev_path, x, dt, A, B, C, D, state, *mask_and_gate = arguments
    state = replay(prev_x, prev_dt, A, prev_B, state, prev_path, A_is_log=A_is_log)
    return tree_scan(x, dt, A, B, C, D, state, *mask_and_gate, A_is_log=A_is_log), state


def rates(A: jax.Array, A_is_log: bool) -> jax.Array:
    """A itself; models store `log(-A)`."""
    return -jnp.exp(A) if A_is_log else A


def gated(y: jax.Array, gate: Gate) -> jax.Array | DeferredRMSNorm:
    """Gates the outputs of a scan; see `api.tree_scan`."""
    rows = y.reshape(*y.shape[:2], -1)
    size = rows.shape[-1]
    columns = total(gate.projected)[..., gate.start : gate.start + size]
    value = rows.astype(jnp.float32) * activated(scaled(columns, gate.multiplier), 0, size)
    if gate.norm_weight is None:
        return value.astype(y.dtype).reshape(y.shape)
    if gate.norm_per_head:
        weight = gate.norm_weight.reshape(y.shape[2:])
        return rms_norm(value.reshape(y.shape), weight, gate.norm_epsilon).astype(y.dtype)
    mean_square = jnp.mean(jnp.square(value), axis=-1, keepdims=True)
    value = value * gate.norm_weight.astype(jnp.float32)[None, None]
    return DeferredRMSNorm(value.astype(y.dtype), mean_square, gate.norm_epsilon)
