"""The norms in jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import DeferredRMSNorm, rms_norm, scaled

ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}  # of gates


def add_rms_norm(
    residual: jax.Array,
    output: jax.Array | DeferredRMSNorm,
    weight: jax.Array,
    *,
    epsilon: float,
    multiplier: float,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    dtype = output.value.dtype if isinstance(output, DeferredRMSNorm) else output.dtype
    if isinstance(output, DeferredRMSNorm):
        output = output.scaled()
    residual = residual + scaled(output, multiplier).astype(residual.dtype)
    return residual, rms_norm(residual, weight, epsilon).astype(dtype)


def gated_rms_norm(
    y: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    *,
    norm: str,
    epsilon: float,
    num_groups: int,
    gate_start: int = 0,
    activation: str = "silu",
) -> jax.Array:
    """See `api.gated_rms_norm`."""
    value, gate = y.astype(jnp.float32), activated(gate, gate_start, y.shape[-1], activation)
    if norm != "norm_then_gate":
        value = value * gate
    if weight is not None:
        grouped = value.reshape(*y.shape[:-1], num_groups, -1)
        mean_square = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
        normed = grouped * lax.rsqrt(mean_square + epsilon)
        weight = jnp.tile(weight.astype(jnp.float32), y.shape[-1] // len(weight))
        value = normed.reshape(y.shape) * lax.broadcast_to_rank(weight, y.ndim)
    if norm == "norm_then_gate":
        value = value * gate
    return value.astype(y.dtype)


def activated(gate: jax.Array, start: int, size: int, activation: str = "silu") -> jax.Array:
    """The activation of `size` columns of the gate from `start` on, float32."""
    return ACTIVATIONS[activation](gate[..., start : start + size].astype(jnp.float32))
