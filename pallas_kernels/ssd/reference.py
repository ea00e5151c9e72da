"""Specification of `ssd`: the Mamba-2 recurrence, one token at a time."""

import numpy as np


def ssd(x, dt, A, B, C, D, state):
    """Outputs of a whole sequence `[B, T, H, P]` and the state after it `[B, H, P, S]`.

    From x `[B, T, H, P]`, dt `[B, T, H]` (0 leaves the state unchanged), A `[H]`, negative, B, C
    `[B, T, G, S]`, D `[H, P]` and the state before.
    """
    batch, length, num_heads, _ = x.shape
    heads_per_group = num_heads // B.shape[2]
    outputs, state = np.zeros_like(x), np.array(state)
    for b in range(batch):
        for t in range(length):
            for h in range(num_heads):
                g = h // heads_per_group
                written = dt[b, t, h] * np.outer(x[b, t, h], B[b, t, g])
                state[b, h] = np.exp(dt[b, t, h] * A[h]) * state[b, h] + written
                outputs[b, t, h] = state[b, h] @ C[b, t, g] + D[h] * x[b, t, h]
    return outputs, state
