"""Specification of `tree_conv1d`: walk from each node to the root, one tap at a time."""

import numpy as np


def tree_conv1d(inputs, conv_state, weight, bias, parents, activation=None):
    """Convolves every node with its `K - 1` nearest ancestors.

    Args:
        inputs: `[B, N, C]`.
        conv_state: `[B, K-1, C]`, the inputs before the root, oldest first.
        weight: `[K, C]`, oldest tap first.
        bias: `[C]` or None.
        parents: `[B, N]`, -1 above a root.
        activation: "silu" or None.

    Returns:
        `[B, N, C]` in the dtype of `inputs`.
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
