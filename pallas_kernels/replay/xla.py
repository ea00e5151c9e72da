"""`replay` as one contraction over the nodes."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import contract


def replay(x, dt, A, B, state, path):
    """See `api.replay`."""
    batch, num_nodes, _, head_dim = x.shape
    num_groups = B.shape[2]
    x, B = x.astype(jnp.float32), B.astype(jnp.float32)

    # Decay from just after node j to the path's end: the sum over *later* nodes, summed as such.
    # The difference of two cumulative sums cancels (1e-5 at 128 nodes with large dt; this 3e-8).
    dt = jnp.where(path[..., None], dt, 0.0)
    decay = dt * A
    later = jnp.concatenate([decay[:, 1:], jnp.zeros_like(decay[:, :1])], axis=1)
    after = lax.cumsum(later, axis=1, reverse=True)
    weight = jnp.exp(after) * dt  # [B, N, H], zero off the path

    grouped = (x * weight[..., None]).reshape(batch, num_nodes, num_groups, -1, head_dim)
    written = contract("bjgkp,bjgs->bgkps", grouped, B)
    total = jnp.exp(decay.sum(axis=1))
    return total[..., None, None] * state + written.reshape(state.shape)
