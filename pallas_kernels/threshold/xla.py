"""The search in jax.numpy: some bits of the threshold in a pass over the values."""

import jax
import jax.numpy as jnp
from jax import lax


def largest_threshold(
    values: jax.Array, summands: jax.Array | None, least: jax.Array, *, is_share: bool
) -> jax.Array:
    """See `api.largest_threshold`."""

    def sums(thresholds: jax.Array) -> jax.Array:
        chosen = values[..., None, :] >= thresholds[..., None]
        if summands is None:
            return chosen.sum(axis=-1, dtype=jnp.int32).astype(least.dtype)
        return jnp.where(chosen, summands[..., None, :], 0).sum(axis=-1)

    if is_share:
        least = least * sums(jnp.zeros((*values.shape[:-1], 1), jnp.float32))

    def search(num_bits: int) -> jax.Array:
        """Searches `num_bits` bits per pass."""

        def find(i: jax.Array, bits: jax.Array) -> jax.Array:
            shift = jnp.maximum(31 - num_bits * (i + 1), 0)
            steps = jnp.arange(1, 2**num_bits, dtype=jnp.int32) << shift
            tried = bits + lax.broadcast_to_rank(steps, bits.ndim)
            passed = sums(lax.bitcast_convert_type(tried, jnp.float32)) >= least
            return bits + (passed.sum(axis=-1, keepdims=True, dtype=jnp.int32) << shift)

        none = jnp.zeros((*values.shape[:-1], 1), jnp.int32)
        return lax.fori_loop(0, -(-31 // num_bits), find, none)

    # A pass over the vocabulary is a launch on a GPU, and arithmetic on a CPU.
    bits = lax.platform_dependent(cpu=lambda: search(1), default=lambda: search(5))
    return lax.bitcast_convert_type(bits, jnp.float32)
