"""Specification of the search: all thresholds that matter, one after the other."""

import numpy as np


def largest_threshold(values, summands, least):
    """The threshold of each row `[R, 1]`.

    Args:
        values, summands: `[R, V]`. least: `[R]`.

    Returns:
        The largest value of a row, or 0, from which on the summands sum up to `least`; 0 if none
        do.
    """
    found = np.zeros((len(values), 1), values.dtype)
    for row, (own, summed) in enumerate(zip(values, summands, strict=True)):
        for threshold in sorted(own[own > 0]):
            if summed[own >= threshold].sum() >= least[row]:
                found[row] = threshold
    return found
