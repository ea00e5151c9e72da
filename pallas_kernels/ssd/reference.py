"""Specification of `ssd`: a sequence is a tree whose nodes are a chain."""

import numpy as np

from pallas_kernels.tree_scan.reference import tree_scan


def ssd(x, dt, A, B, C, D, state):
    """Outputs of a whole sequence `[B, T, H, P]` and the state after it `[B, H, P, S]`.

    From x `[B, T, H, P]`, dt `[B, T, H]` (0 leaves the state unchanged), A `[H]`, negative, B, C
    `[B, T, G, S]`, D `[H, P]` and the state before.
    """
    batch, length = dt.shape[:2]
    parents = np.broadcast_to(np.arange(-1, length - 1), (batch, length))
    outputs, states = tree_scan(x, dt, A, B, C, D, state, parents)
    return outputs, states[:, -1]
