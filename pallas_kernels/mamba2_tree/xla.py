"""`mamba2_tree` as its parts, each of which chooses its implementation."""

import jax.numpy as jnp

from pallas_kernels.gated_rms_norm.xla import activated
from pallas_kernels.mamba2_tree.records import Mamba2Pending
from pallas_kernels.numerics import Unscaled
from pallas_kernels.replay.api import replay
from pallas_kernels.replay_tree_scan.api import replay_tree_scan
from pallas_kernels.tree_conv1d.api import replay_conv_state, tree_conv1d
from pallas_kernels.tree_scan.api import tree_scan


def mamba2_tree(
    projected,
    weights,
    ssm,
    conv_state,
    window,
    ancestor_mask,
    *,
    layout,
    grown,
    previous,
    gated,
    norm_weight,
    norm_epsilon,
    implementation,
):
    """See `api.mamba2_tree`."""
    # jax-triton has the scan and the replay only.
    common = implementation
    A, D = weights.A(), weights.skip(layout)
    if previous is not None:
        old, path, back = previous
        conv_state = replay_conv_state(old.conv_input, conv_state, back)
        if implementation == "jax_triton":
            ssm = replay(old.x, old.dt, A, old.B, ssm, path, implementation=implementation)

    conv_input = layout.conv_input(projected)
    dt = layout.time_steps(projected, weights.dt_bias)
    if grown is not None:
        conv_input = jnp.concatenate([grown.conv_input, conv_input], axis=1)
        dt = jnp.concatenate([grown.dt, dt], axis=1)
    conv = tree_conv1d(
        *(conv_input, conv_state, weights.conv_weight, weights.conv_bias, window),
        activation="silu",
        implementation=common,
    )
    x, B, C = layout.heads(conv)
    if grown is not None:
        x = jnp.concatenate([grown.x, x], axis=1)
        B = jnp.concatenate([grown.B, B], axis=1)

    new = (x, dt, A, B, C, D)
    if previous is None or implementation == "jax_triton":
        y = tree_scan(*new, ssm, ancestor_mask, implementation=implementation)
    else:
        y, ssm = replay_tree_scan(
            *(old.x, old.dt, old.B, path),
            *(*new, ssm, ancestor_mask),
            implementation=common,
        )
    y = y.reshape(*y.shape[:2], -1)
    if gated:
        gate, start = layout.gate(projected)
        y = _gated(y, activated(gate, start, y.shape[-1]), norm_weight, norm_epsilon)
    return y, Mamba2Pending(x, dt, B, conv_input), ssm, conv_state


def _gated(y, gate, norm_weight, norm_epsilon):
    """Gated outputs `[B, Q, H * P]`; `Unscaled` if a norm is behind the gate."""
    value = y.astype(jnp.float32) * gate
    if norm_weight is None:
        return value.astype(y.dtype)
    mean_square = jnp.mean(jnp.square(value), axis=-1, keepdims=True)
    value = value * norm_weight.astype(jnp.float32)
    return Unscaled(value.astype(y.dtype), mean_square, norm_epsilon)
