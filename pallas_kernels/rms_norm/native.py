"""The norms by our own code, `native.cc`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.numerics import DeferredRMSNorm


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """See `api.rms_norm`."""
    rows = native.rows_of(x)
    result = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    normed = native.call(
        "rms_norm", result, rows, weight.astype(jnp.float32), epsilon=float(epsilon)
    )
    return normed.reshape(x.shape)


def add_rms_norm(
    residual: jax.Array,
    output: Any,
    weight: jax.Array,
    *,
    epsilon: float,
    multiplier: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    rows = native.rows_of(residual)
    mean_squares, deferred_epsilon = None, 0.0
    if isinstance(output, DeferredRMSNorm):
        mean_squares, deferred_epsilon = native.rows_of(output.mean_squares), output.epsilon
        output = output.value
    result = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    total, normed = native.call(
        "add_rms_norm",
        [result, result],
        rows,
        native.rows_of(output),
        mean_squares,
        weight.astype(jnp.float32),
        multiplier=float(multiplier),
        epsilon=float(epsilon),
        deferred_epsilon=float(deferred_epsilon),
    )
    return total.reshape(residual.shape), normed.reshape(residual.shape)


def gated_rms_norm(
    y: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    *,
    norm: str,
    epsilon: float,
    num_groups: int,
    gate_start: int,
    activation: str,
) -> jax.Array:
    """See `api.gated_rms_norm`."""
    rows = native.rows_of(y)
    if weight is not None:
        weight = jnp.tile(weight.astype(jnp.float32), y.shape[-1] // len(weight))
    result = native.call(
        "gated_rms_norm",
        jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        rows,
        native.rows_of(gate),
        weight,
        epsilon=float(epsilon),
        groups=num_groups,
        gate_start=gate_start,
        gate_first=int(norm != "norm_then_gate"),
        is_sigmoid=int(activation == "sigmoid"),
    )
    return result.reshape(y.shape)
