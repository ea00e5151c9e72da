"""`ssd` in chunks: quadratic inside a chunk, a short scan between chunks.

Section 6 of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.numerics import contract


def ssd(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array, state: Array, chunk_size: int
) -> tuple[Array, Array]:
    """See `api.ssd`."""
    batch, length, num_heads, head_dim = x.shape
    num_groups = B.shape[2]
    dtype, skip = x.dtype, D.reshape(num_heads, -1)[None, None] * x.astype(jnp.float32)
    chunk_size = min(chunk_size, length)

    # Padding with dt = 0 leaves the state unchanged.
    def chunked(v: jax.Array) -> jax.Array:
        pad = [(0, 0), (0, -length % chunk_size)] + [(0, 0)] * (v.ndim - 2)
        return jnp.pad(v, pad).reshape(batch, -1, chunk_size, *v.shape[2:])

    x, dt, B, C = (chunked(v.astype(jnp.float32)) for v in (x, dt, B, C))
    num_chunks = x.shape[1]
    heads = (num_groups, num_heads // num_groups)

    # 1. Log-decay accumulated inside each chunk. [B, chunks, H, t]
    dt = dt.transpose(0, 1, 3, 2)
    decay = jnp.cumsum(dt * A[None, None, :, None], axis=-1)

    # 2. Inside a chunk: masked before exp, as in tree_scan with a causal mask.
    causal = jnp.tril(jnp.ones((chunk_size, chunk_size), bool))
    exponent = jnp.where(causal, decay[..., :, None] - decay[..., None, :], -jnp.inf)
    scores = contract("bcigs,bcjgs->bcgij", C, B)
    weight = (jnp.exp(exponent) * dt[..., None, :]).reshape(
        batch, num_chunks, *heads, chunk_size, chunk_size
    )
    weight = (weight * scores[:, :, :, None]).reshape(exponent.shape)
    y = contract("bchij,bcjhp->bcihp", weight, x)

    # 3. What each chunk writes into the state at its end.
    to_end = (jnp.exp(decay[..., -1:] - decay) * dt).transpose(0, 1, 3, 2)
    written = (x * to_end[..., None]).reshape(batch, num_chunks, chunk_size, *heads, head_dim)
    written = contract("bcjgkp,bcjgs->bcgkps", written, B).reshape(
        batch, num_chunks, *state.shape[1:]
    )

    # 4. The state before each chunk.
    total = jnp.exp(decay[..., -1])

    def step(carry: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        chunk_total, chunk_written = chunk
        return chunk_total[..., None, None] * carry + chunk_written, carry

    state, before = lax.scan(step, state, (total.swapaxes(0, 1), written.swapaxes(0, 1)))

    # 5. The state before the chunk, read by every position in it.
    before = before.swapaxes(0, 1).reshape(batch, num_chunks, *heads, *state.shape[2:])
    carried = contract("bcigs,bcgkps->bcigkp", C, before).reshape(y.shape)
    y = y + carried * jnp.exp(decay).transpose(0, 1, 3, 2)[..., None]

    y = y.reshape(batch, -1, num_heads, head_dim)[:, :length]
    return (y + skip).astype(dtype), state
