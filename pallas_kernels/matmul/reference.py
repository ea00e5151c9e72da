"""Specification of `matmul`: every row times its matrix, in any float type."""

import numpy as np


def matmul(x, blocks, scales, columns, which=None):
    """The products `[rows, columns]` of rows `[rows, I]` with blocks `[*E, blocks, I, 32]`.

    `scales` are `[*E, blocks, ceil(I / 32), 32]`, or None: all 1. `which` `[rows]` is the matrix of
    each row, or None: there is one. The last block may have more columns.
    """
    y = np.zeros((len(x), columns), x.dtype)
    inputs = np.arange(x.shape[-1])
    for r, row in enumerate(x):
        own = blocks if which is None else blocks[which[r]]
        factors = scales if which is None or scales is None else scales[which[r]]
        for o in range(columns):
            weights = own[o // 32, :, o % 32].astype(x.dtype)
            if factors is not None:
                weights *= factors[o // 32, inputs // 32, o % 32].astype(x.dtype)
            y[r, o] = (row * weights).sum()
    return y
