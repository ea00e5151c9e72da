"""Specification of `mamba2_tree`: the parts of the layer one after the other, node by node."""

import numpy as np

from pallas_kernels.replay_tree_scan.reference import replay_tree_scan
from pallas_kernels.tree_conv1d.reference import replay_conv_state, tree_conv1d


def mamba2_tree(
    projected,
    weights,
    ssm,
    conv_state,
    parents,
    *,
    layout,
    previous,
    gated=False,
    norm_weight=None,
):
    """A whole tree after the accepted path of the previous one.

    Args:
        projected: `[B, N, E]`, columns as `layout` says.
        weights: conv_weight `[K, C]`, conv_bias `[C]` or None, dt_bias `[H]`, A_log `[H]`, and D
            `[H]` or `[H * P]`.
        ssm, conv_state: before the root of the previous tree.
        parents: `[B, N]`, of this tree.
        layout: a `Layout`.
        previous: `(x, dt, B, conv_input)` of the previous tree, its path `[B, O]`, its parents, and
            the path's last node, -1 for the empty path.
        gated: whether outputs are multiplied by `silu(z)`.
        norm_weight: `[H * P]`, that the gated outputs are multiplied by, or None.

    Returns:
        outputs `[B, N, H * P]`, the record `(x, dt, B, conv_input)` of the tree, both states before
        its root, and the mean squares `[B, N]` of the outputs before `norm_weight`.
    """
    conv_weight, conv_bias, dt_bias, A_log, D = weights
    (old_x, old_dt, old_B, old_conv_input), path, old_parents, last = previous
    heads, size = layout.num_heads, layout.head_dim
    groups, state_size = layout.num_groups, layout.state_size

    ends = [*layout.columns, projected.shape[-1]]
    parts = [
        projected[..., start:end] * multiplier
        for start, end, multiplier in zip(ends, ends[1:], layout.multipliers, strict=False)
    ]
    z, x, B, C, dt = parts
    if layout.repeat_before_conv:
        x, B = repeated(x, size, heads), repeated(B, state_size, groups)
    conv_input = np.concatenate([x, B, C], axis=-1)
    conv_state = replay_conv_state(old_conv_input, conv_state, old_parents, last)
    conv = tree_conv1d(conv_input, conv_state, conv_weight, conv_bias, parents, "silu")

    rows = conv.shape[:2]
    end_of_x, end_of_B = layout.channels[1:]
    x = repeated(conv[..., :end_of_x], size, heads).reshape(*rows, heads, size)
    B = repeated(conv[..., end_of_x:end_of_B], state_size, groups)
    B = B.reshape(*rows, groups, state_size)
    C = conv[..., end_of_B:].reshape(*rows, groups, state_size)
    dt = np.clip(np.log1p(np.exp(dt + dt_bias)), *layout.dt_limit)
    D = np.broadcast_to(D.reshape(heads, -1), (heads, size))
    y, ssm = replay_tree_scan(
        *(old_x, old_dt, old_B, path), *(x, dt, -np.exp(A_log), B, C, D), ssm, parents
    )

    y = y.reshape(*rows, -1)
    if gated:
        y = y * z / (1 + np.exp(-z))
    mean_squares = np.mean(y**2, axis=-1)
    if norm_weight is not None:
        y = y * norm_weight
    return y, (x, dt, B, conv_input), ssm, conv_state, mean_squares


def repeated(x, size, count):
    """Each head of `size` numbers as often as needed for `count` heads."""
    heads = x.reshape(*x.shape[:-1], -1, size)
    return np.repeat(heads, count // heads.shape[-2], axis=-2).reshape(*x.shape[:-1], -1)
