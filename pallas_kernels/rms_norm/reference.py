"""Specification of the norms: one row and one group at a time."""

import numpy as np


def add_rms_norm(residual, output, weight, *, epsilon, multiplier, deferred=None):
    """The sums `[R, M]` and their norms `[R, M]`.

    For a deferred norm of `output`, `deferred` has the summands of the mean square `[R, J]`, and
    the epsilon added to their sum.
    """
    sums, normed = np.zeros_like(residual), np.zeros_like(residual)
    for row in range(residual.shape[0]):
        scale = multiplier
        if deferred is not None:
            parts, added = deferred
            scale = multiplier / np.sqrt(np.sum(parts[row]) + added)
        sums[row] = residual[row] + scale * output[row]
        normed[row] = sums[row] / np.sqrt(np.mean(sums[row] ** 2) + epsilon) * weight
    return sums, normed


def gated_rms_norm(y, gate, weight, *, norm, epsilon, num_groups, activation="silu"):
    """The gated and normed rows `[R, M]`; `norm` and `activation` as in `api`."""
    size = y.shape[1] // num_groups
    factor = (gate if activation == "silu" else 1) / (1 + np.exp(-gate))
    output = np.zeros_like(y)
    for row in range(y.shape[0]):
        for start in range(0, y.shape[1], size):
            part = slice(start, start + size)
            value = y[row, part]
            if norm != "norm_then_gate":
                value = value * factor[row, part]
            if norm != "none":
                value = value / np.sqrt(np.mean(value**2) + epsilon) * weight[part]
            if norm == "norm_then_gate":
                value = value * factor[row, part]
            output[row, part] = value
    return output
