"""`ssd` by our own code, `native.cc`: one step after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels import native


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `api.ssd`."""
    results = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (x, state)]
    y, state = native.call("ssd", results, x, dt, A, B, C, D, state, aliases={6: 1})
    return y, state
