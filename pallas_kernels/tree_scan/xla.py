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


def scan(
    previous: Any, tree: Any, A: jax.Array, state: jax.Array, gate: Gate | None, *, A_is_log: bool
) -> tuple[Any, jax.Array]:
    """See `api._run`, whose arrays these are. One tree after the other."""
    A = rates(A, A_is_log)
    if previous is not None:
        state = _replayed(A, state, *previous)
    if tree is None:
        return None, state
    y = _outputs(A, state, *tree)
    return y if gate is None else gated(y, gate), state


def _outputs(
    A: jax.Array,
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """The outputs of a tree's queries, in the dtype of x."""
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

    return (y + D.reshape(1, 1, num_heads, -1) * x[:, first_query:]).astype(dtype)


def _replayed(
    A: jax.Array, state: jax.Array, x: jax.Array, dt: jax.Array, B: jax.Array, path: jax.Array
) -> jax.Array:
    """The state after a path. One contraction over the nodes."""
    x, B = x.astype(jnp.float32), B.astype(jnp.float32)
    dt = jnp.where(path[..., None], dt, 0.0)
    weight, total = to_the_end(dt * A[None, None])
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
