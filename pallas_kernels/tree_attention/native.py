"""`tree_attention` by our own code, `native.cc`."""

import jax
import jax.numpy as jnp

from pallas_kernels import native


def tree_attention(*arguments: jax.Array, scale: float) -> jax.Array:
    """See `api.tree_attention`, whose arrays these are. Reads the cache up to its length."""
    *arrays, length, mask = arguments
    result = jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)
    return native.call(
        "tree_attention", result, *arrays, length.astype(jnp.int32), mask, scale=float(scale)
    )
