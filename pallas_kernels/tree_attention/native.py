"""`tree_attention` by our own code, `native.cc`."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native


def tree_attention(
    query: jax.Array,
    node_keys: jax.Array,
    node_values: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """See `api.tree_attention`. Reads the cache up to its length."""
    result = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    arrays = query, node_keys, node_values, keys, values, length.astype(jnp.int32), mask
    return native.call("tree_attention", result, *arrays, scale=np.float32(scale))
