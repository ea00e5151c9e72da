"""The search by our own code, `native.cc`."""

import jax
import jax.numpy as jnp

from pallas_kernels import native


def largest_threshold(
    values: jax.Array, summands: jax.Array | None, least: jax.Array, *, is_share: bool
) -> jax.Array:
    """See `api.largest_threshold`."""
    rows, size = native.rows_of(values), values.shape[-1]
    threshold = native.call(
        "largest_threshold",
        jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32),
        rows,
        jnp.zeros((0, size), jnp.float32) if summands is None else native.rows_of(summands),
        jnp.broadcast_to(least, (*values.shape[:-1], 1)).reshape(len(rows)),
        is_share=int(is_share),
    )
    return threshold.reshape(*values.shape[:-1], 1)
