"""Specification of `tree_scan`: run the Mamba-2 recurrence along every root-to-node path."""

import numpy as np


def tree_scan(x, dt, A, B, C, D, state, parents):
    """The output at every node, one state per node, no closed form.

    Args:
        x: `[B, N, H, P]`. dt: `[B, N, H]`, after softplus and clamp. A: `[H]`, negative.
        B, C: `[B, N, G, S]`; head h uses group `h // (H / G)`. D: `[H, P]`.
        state: `[B, H, P, S]` before the root. parents: `[B, N]`, -1 above a root.

    Returns:
        outputs `[B, N, H, P]` and the state after each node `[B, N, H, P, S]`.
    """
    batch, num_nodes, num_heads, _ = x.shape
    heads_per_group = num_heads // B.shape[2]
    outputs = np.zeros_like(x)
    states = np.zeros((batch, num_nodes, *state.shape[1:]), state.dtype)
    for b in range(batch):
        for node in range(num_nodes):
            above = parents[b, node]
            before = states[b, above] if above >= 0 else state[b]
            for h in range(num_heads):
                g = h // heads_per_group
                decay = np.exp(dt[b, node, h] * A[h])
                written = dt[b, node, h] * np.outer(x[b, node, h], B[b, node, g])
                states[b, node, h] = decay * before[h] + written
                outputs[b, node, h] = states[b, node, h] @ C[b, node, g] + D[h] * x[b, node, h]
    return outputs, states
