"""Specification of `tree_conv1d`: walk from each node to the root, one tap at a time."""

import numpy as np


def tree_conv1d(inputs, conv_state, weight, bias, parents, activation=None):
    """Convolves every node `[B, N, C]` with its `K - 1` nearest ancestors.

    The conv state `[B, K-1, C]` are the inputs before the root, oldest first, as the taps of
    `weight` `[K, C]`; parents `[B, N]` are -1 above a root; the activation is "silu" or None.
    """
    batch, num_nodes, channels = inputs.shape
    width = weight.shape[0]
    output = np.zeros((batch, num_nodes, channels), inputs.dtype)
    for b in range(batch):
        for node in range(num_nodes):
            above = node
            for tap in reversed(range(width)):
                # above = -1, -2, ... counts back into the state: its last column is the newest.
                value = inputs[b, above] if above >= 0 else conv_state[b, above]
                output[b, node] += weight[tap] * value
                above = parents[b, above] if above >= 0 else above - 1
            if bias is not None:
                output[b, node] += bias
    return output / (1 + np.exp(-output)) if activation == "silu" else output


def replay_conv_state(inputs, conv_state, parents, last):
    """The `K - 1` inputs up to node `last[b]` (-1: the state unchanged). `[B, K-1, C]`."""
    new_state = np.zeros_like(conv_state)
    for b in range(inputs.shape[0]):
        above = last[b]
        for column in reversed(range(conv_state.shape[1])):
            new_state[b, column] = inputs[b, above] if above >= 0 else conv_state[b, above]
            above = parents[b, above] if above >= 0 else above - 1
    return new_state


def tree_conv1d_layer(
    projected, conv_weight, conv_bias, dt_bias, conv_state, parents, *, layout, previous
):
    """The pending record of a tree, C `[B, N, G, S]`, and the conv state before the root.

    From the projection `[B, N, X]` and the conv state before the root of the previous tree, of
    which `previous` is conv_input `[B, O, C]`, parents and the accepted path's last node, -1: none.
    """
    heads, size = layout.num_heads, layout.head_dim
    groups, state_size = layout.num_groups, layout.state_size
    _, x, B, C, dt = sections(projected, layout)
    if layout.repeat_before_conv:
        x, B = repeated(x, size, heads), repeated(B, state_size, groups)
    conv_input = np.concatenate([x, B, C], axis=-1)
    old_conv_input, old_parents, last = previous
    conv_state = replay_conv_state(old_conv_input, conv_state, old_parents, last)
    conv = tree_conv1d(conv_input, conv_state, conv_weight, conv_bias, parents, "silu")

    rows = conv.shape[:2]
    end_of_x, end_of_B = layout.channels[1:]
    x = repeated(conv[..., :end_of_x], size, heads).reshape(*rows, heads, size)
    B = repeated(conv[..., end_of_x:end_of_B], state_size, groups)
    B = B.reshape(*rows, groups, state_size)
    C = conv[..., end_of_B:].reshape(*rows, groups, state_size)
    dt = np.clip(np.log1p(np.exp(dt + dt_bias)), *layout.dt_limit)
    return (x, dt, B, conv_input), C, conv_state


def short_conv_layer(projected, weight, bias, conv_state, parents, *, previous):
    """Outputs `[B, N, C]`, products `[B, N, C]` and the conv state before the root.

    The projection `[B, N, 3 C]` has gates of inputs, gates of outputs, and inputs; `previous` as of
    `tree_conv1d_layer`.
    """
    of_inputs, of_outputs, x = np.split(projected, 3, axis=-1)
    old, old_parents, last = previous
    conv_state = replay_conv_state(old, conv_state, old_parents, last)
    conv = tree_conv1d(of_inputs * x, conv_state, weight, bias, parents)
    return of_outputs * conv, of_inputs * x, conv_state


def sections(projected, layout):
    """z, x, B, C and dt of the projection, each with its multiplier."""
    ends = [*layout.columns[1:], projected.shape[-1]]
    return [
        projected[..., start:end] * multiplier
        for start, end, multiplier in zip(layout.columns, ends, layout.multipliers, strict=True)
    ]


def repeated(x, size, count):
    """Each head of `size` channels repeated until there are `count` heads."""
    heads = x.reshape(*x.shape[:-1], -1, size)
    return np.repeat(heads, count // heads.shape[-2], axis=-2).reshape(*x.shape[:-1], -1)
