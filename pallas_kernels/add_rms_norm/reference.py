"""Specification of `add_rms_norm`: one row at a time."""

import numpy as np


def add_rms_norm(residual, output, weight, *, epsilon, multiplier, unscaled=None):
    """The sums `[R, M]` and their norms `[R, M]`.

    Args:
        residual, output: `[R, M]`. weight: `[M]`.
        epsilon: added to the mean square. multiplier: of the output.
        unscaled: the mean square that the output is yet to be divided by the root of, in parts
            `[R, J]`, and what is added to it; None: nothing of the kind.
    """
    sums, normed = np.zeros_like(residual), np.zeros_like(residual)
    for row in range(residual.shape[0]):
        scale = multiplier
        if unscaled is not None:
            parts, added = unscaled
            scale = multiplier / np.sqrt(np.sum(parts[row]) + added)
        sums[row] = residual[row] + scale * output[row]
        normed[row] = sums[row] / np.sqrt(np.mean(sums[row] ** 2) + epsilon) * weight
    return sums, normed
