"""The search by our own code, `native.cc`."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import native


def largest_threshold(values: jax.Array, summands: jax.Array | None, least: jax.Array) -> jax.Array:
    """See `api.largest_threshold`."""
    *rows, size = values.shape
    count = math.prod(rows)
    threshold = native.call(
        "largest_threshold",
        jax.ShapeDtypeStruct((count,), jnp.float32),
        values.reshape(count, size),
        jnp.zeros((0, size)) if summands is None else summands.reshape(count, size),
        jnp.broadcast_to(least, (*rows, 1)).reshape(count),
    )
    return threshold.reshape(*rows, 1)
