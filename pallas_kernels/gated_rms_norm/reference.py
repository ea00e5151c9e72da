"""Specification of `gated_rms_norm`: one row and one group at a time."""

import numpy as np


def gated_rms_norm(y, gate, weight, *, norm, epsilon, num_groups):
    """The gated and normed rows.

    Args:
        y, gate: `[R, M]`. weight: `[M]`; unused if `norm` is "none".
        norm: "gate_then_norm", "norm_then_gate" or "none".
        epsilon: added to the mean square. num_groups: equal parts of a row, each normed alone.

    Returns:
        `[R, M]`.
    """
    size = y.shape[1] // num_groups
    silu = gate / (1 + np.exp(-gate))
    output = np.zeros_like(y)
    for row in range(y.shape[0]):
        for start in range(0, y.shape[1], size):
            part = slice(start, start + size)
            value = y[row, part]
            if norm != "norm_then_gate":
                value = value * silu[row, part]
            if norm != "none":
                value = value / np.sqrt(np.mean(value**2) + epsilon) * weight[part]
            if norm == "norm_then_gate":
                value = value * silu[row, part]
            output[row, part] = value
    return output
