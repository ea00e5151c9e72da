"""`gated_rms_norm` in jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax


def gated_rms_norm(y, gate, weight, *, norm, epsilon, num_groups, gate_start=0):
    """See `api.gated_rms_norm`."""
    value, gate = y.astype(jnp.float32), activated(gate, gate_start, y.shape[-1])
    if norm != "norm_then_gate":
        value = value * gate
    if norm != "none":
        grouped = value.reshape(*y.shape[:-1], num_groups, -1)
        mean_square = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
        normed = grouped * lax.rsqrt(mean_square + epsilon)
        value = normed.reshape(y.shape) * weight.astype(jnp.float32)
    if norm == "norm_then_gate":
        value = value * gate
    return value.astype(y.dtype)


def activated(gate, start, size):
    """`silu` of `size` columns of the gate from `start` on, float32."""
    return jax.nn.silu(gate[..., start : start + size].astype(jnp.float32))
