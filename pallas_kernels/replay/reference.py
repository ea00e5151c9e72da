"""Specification of `replay`: the recurrence, run over the nodes of one path."""

import numpy as np


def replay(x, dt, A, B, state, path):
    """The state after the nodes that `path` marks.

    Args:
        x: `[B, N, H, P]`. dt: `[B, N, H]`. A: `[H]`. B: `[B, N, G, S]`. state: `[B, H, P, S]`.
        path: `[B, N]` bool, a root-to-node path in node order; all False leaves the state as it is.

    Returns:
        `[B, H, P, S]`.
    """
    batch, num_nodes, num_heads, _ = x.shape
    heads_per_group = num_heads // B.shape[2]
    new_state = np.array(state)
    for b in range(batch):
        for node in range(num_nodes):
            if not path[b, node]:
                continue
            for h in range(num_heads):
                decay = np.exp(dt[b, node, h] * A[h])
                written = np.outer(x[b, node, h], B[b, node, h // heads_per_group])
                new_state[b, h] = decay * new_state[b, h] + dt[b, node, h] * written
    return new_state
