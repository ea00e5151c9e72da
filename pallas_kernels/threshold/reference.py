"""Specification of the search: all thresholds that matter, one after the other."""

import numpy as np


def largest_threshold(values, summands, least):
    """The largest value `[R, 1]` from which on summands sum up to `least` `[R]`; 0: none do."""
    found = np.zeros((len(values), 1), values.dtype)
    for row, (own, summed) in enumerate(zip(values, summands, strict=True)):
        for threshold in sorted(own[own > 0]):
            if summed[own >= threshold].sum() >= least[row]:
                found[row] = threshold
    return found
