"""Specification of `add_rms_norm`: one row at a time."""

import numpy as np


def add_rms_norm(residual, output, weight, *, epsilon, multiplier):
    """The sums `[R, M]` and their norms `[R, M]`, of two arrays `[R, M]` and a weight `[M]`."""
    sums, normed = np.zeros_like(residual), np.zeros_like(residual)
    for row in range(residual.shape[0]):
        sums[row] = residual[row] + multiplier * output[row]
        normed[row] = sums[row] / np.sqrt(np.mean(sums[row] ** 2) + epsilon) * weight
    return sums, normed
