"""`tree_conv1d` as one gather per tap by a shared index: XLA fuses the taps into one loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import rounded
from pallas_kernels.tree_conv1d.layout import Mamba2Layout, Mamba2Pending


def tree_conv1d(
    *arrays: Any,
    activation: str | None,
) -> jax.Array:
    """See `api.tree_conv1d`, whose arrays these are."""
    inputs, conv_state, weight, bias, conv_gather_index = arrays
    context = jnp.concatenate([conv_state.astype(inputs.dtype), inputs], axis=1)
    output = jnp.float32(0) if bias is None else bias.astype(jnp.float32)[None, None]
    for tap in range(weight.shape[0]):
        index = conv_gather_index[:, :, tap, None]
        rows = jnp.take_along_axis(context, index, axis=1, mode="clip")
        taps = weight[tap].astype(jnp.float32)[None, None]
        output = output + rounded(rows.astype(jnp.float32) * taps)
    if activation == "silu":
        output = jax.nn.silu(output)
    return output.astype(inputs.dtype)


def tree_conv1d_layer(
    *arrays: Any,
    layout: Mamba2Layout,
) -> tuple[Mamba2Pending, jax.Array, jax.Array]:
    """See `api.tree_conv1d_layer`, whose arrays these are."""
    projected, conv_weight, conv_bias, dt_bias, conv_state, conv_gather_index, *trees = arrays
    prefix_pending, previous = trees
    if previous is not None:
        old, replay_gather_index = previous
        conv_state = replay_conv_state(old.conv_input, conv_state, replay_gather_index)
    new = layout.conv_input(projected)
    conv_input = new if prefix_pending is None else _after(prefix_pending.conv_input, new)
    weights = (conv_weight, conv_bias)
    conv = tree_conv1d(conv_input, conv_state, *weights, conv_gather_index, activation="silu")
    x, B, C = layout.heads(conv)
    dt = layout.time_steps(projected, dt_bias)
    if prefix_pending is not None:
        x, dt, B = map(_after, prefix_pending[:3], (x, dt, B))
    return Mamba2Pending(x, dt, B, conv_input), C, conv_state


def short_conv_layer(
    *arrays: Any, convolve: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.short_conv_layer`, whose arrays these are; `convolve` is `tree_conv1d`."""
    projected, weight, bias, conv_state, conv_gather_index, prefix_pending, previous = arrays
    if previous is not None:
        old, replay_gather_index = previous
        conv_state = replay_conv_state(old, conv_state, replay_gather_index)
    of_inputs, of_outputs, x = jnp.split(projected, 3, axis=-1)
    conv_input = of_inputs * x
    if prefix_pending is not None:
        conv_input = _after(prefix_pending, conv_input)
    y = convolve(conv_input, conv_state, weight, bias, conv_gather_index)
    return of_outputs * y, conv_input, conv_state


def replay_conv_state(
    inputs: jax.Array, conv_state: jax.Array, replay_gather_index: jax.Array
) -> jax.Array:
    """See `api.replay_conv_state`."""
    context = jnp.concatenate([conv_state, inputs.astype(conv_state.dtype)], axis=1)
    return jnp.take_along_axis(context, replay_gather_index[..., None], axis=1)


def _after(prefix: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.concatenate([prefix, new], axis=1)
