"""`tree_attention` by our own code, `native.cc`."""

import jax
import jax.numpy as jnp

from pallas_kernels import native


def tree_attention(*arguments: jax.Array, scale: float, window: int | None = None) -> jax.Array:
    """See `api.tree_attention`, whose arrays these are. Reads the cache up to its length."""
    *arrays, length, mask = arguments
    result = jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)
    arrays += [length.astype(jnp.int32), mask]
    return native.call("tree_attention", result, *arrays, scale=float(scale), window=window or 0)
