"""`ssd` by our own code, `native.cc`: one step after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels import native


def unsupported(x: jax.Array) -> str | None:
    """Why these inputs cannot run, or None."""
    if x.dtype != jnp.float32:
        return f"the native scan is for float32, got {x.dtype.name}"
    if x.shape[-1] % native.LANES:
        return f"{x.shape[-1]} channels are no multiple of {native.LANES}"
    return None


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
