"""Specification of `matmul`: every row times its matrix, in any float type."""

import numpy as np


def matmul(x, blocks, scales, columns, which=None):
    """The products `[rows, columns]`.

    Args:
        x: `[rows, I]`.
        blocks: `[blocks, I, 32]`, or `[E, blocks, I, 32]` with `which`.
        scales: `[n, ceil(I / 32), 32]`, or `[E, ...]`; None: all 1.
        columns: number of columns; the last block may have more.
        which: `[rows]`, the matrix of each row; None: there is one matrix.
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
