"""Specification of the scans: run the Mamba-2 recurrence along every root-to-node path."""

import numpy as np


def advanced(before, x, dt, A, B):
    """The state `[P, S]` of a head after one more node, from x `[P]`, dt, A and B `[S]`."""
    return np.exp(dt * A) * before + dt * np.outer(x, B)


def tree_scan(x, dt, A, B, C, D, state, parents):
    """Outputs `[B, N, H, P]` and the state after each node `[B, N, H, P, S]`, no closed form.

    From x `[B, N, H, P]`, dt `[B, N, H]` after softplus and clamp, A `[H]`, negative, B, C `[B, N,
    G, S]` (head h uses group `h // (H / G)`), D `[H, P]`, the state `[B, H, P, S]` before the root
    and parents `[B, N]`, -1 above a root.
    """
    batch, num_nodes, num_heads, _ = x.shape
    heads_per_group = num_heads // B.shape[2]
    outputs = np.zeros_like(x)
    states = np.zeros((batch, num_nodes, *state.shape[1:]), state.dtype)
    for b, node, h in np.ndindex(batch, num_nodes, num_heads):
        above, group = parents[b, node], h // heads_per_group
        before = states[b, above, h] if above >= 0 else state[b, h]
        after = advanced(before, x[b, node, h], dt[b, node, h], A[h], B[b, node, group])
        outputs[b, node, h] = after @ C[b, node, group] + D[h] * x[b, node, h]
        states[b, node, h] = after
    return outputs, states


def replay(x, dt, A, B, state, path):
    """The state `[B, H, P, S]` after the nodes that `path` marks.

    `path` `[B, N]` is a root-to-node path in node order; all False leaves the state as it is.
    """
    batch, num_nodes, num_heads, _ = x.shape
    heads_per_group = num_heads // B.shape[2]
    new_state = np.array(state)
    for b, node, h in np.ndindex(batch, num_nodes, num_heads):
        if path[b, node]:
            group = h // heads_per_group
            new_state[b, h] = advanced(
                new_state[b, h], x[b, node, h], dt[b, node, h], A[h], B[b, node, group]
            )
    return new_state


def replay_tree_scan(prev_x, prev_dt, prev_B, prev_path, x, dt, A, B, C, D, state, parents):
    """Outputs of a tree that grows from the end of the previous path, and the state before it."""
    new_state = replay(prev_x, prev_dt, A, prev_B, state, prev_path)
    outputs, _ = tree_scan(x, dt, A, B, C, D, new_state, parents)
    return outputs, new_state


def gated_and_normed_by_head(outputs, gate, norm_weight, epsilon):
    """The gated outputs of a scan with a norm of each head; arguments as in `gated`."""
    heads = outputs * (gate / (1 + np.exp(-gate))).reshape(outputs.shape)
    mean_squares = np.mean(heads**2, axis=-1, keepdims=True)
    return heads / np.sqrt(mean_squares + epsilon) * norm_weight.reshape(outputs.shape[2:])


def gated(outputs, gate, norm_weight=None):
    """The rows `[B, N, H * P]` after gate and a deferred norm, and their mean squares `[B, N]`.

    `gate` is the input of the SiLU, multiplier applied; without `norm_weight` rows are gated only.
    """
    rows = outputs.reshape(gate.shape) * gate / (1 + np.exp(-gate))
    mean_squares = np.mean(rows**2, axis=-1)
    return rows if norm_weight is None else rows * norm_weight, mean_squares
