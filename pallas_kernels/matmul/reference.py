"""Specification of `matmul`: every row times its matrix.

In any float type without scales. With them, weights have 8 or 4 bits and rows have 8 bits, the sums
of a group are of integers, and what is rounded to float32 is written out.
"""

import numpy as np

GROUP = 32


def matmul(x, blocks, scales, columns, which=None):
    """The products `[rows, columns]` of rows `[rows, I]` with blocks.

    Blocks are `[*E, blocks, I, 32]`; with `scales [*E, blocks, groups, 32]` they are int8 pairs of
    inputs `[*E, blocks, groups, 16, 32, 2]`, or uint8 `[*E, blocks, groups, 4, 32, 4]` of two
    4-bit weights. `which [rows]` is the matrix of each row, or None: there is one. The last block
    may have more columns.
    """
    y = np.zeros((len(x), columns), x.dtype)
    for r, row in enumerate(x):
        own, factors = (
            array if which is None or array is None else array[which[r]]
            for array in (blocks, scales)
        )
        if scales is not None:
            y[r] = in_eight_bits(row, own, factors)[:columns]
            continue
        for o in range(columns):
            y[r, o] = (row * own[o // 32, :, o % 32].astype(x.dtype)).sum()
    return y


def in_eight_bits(row, blocks, factors):
    """The products of a row with all columns: a fused multiply-add for each group, in order."""
    groups, columns = blocks.shape[1], 32 * len(blocks)
    if blocks.dtype == np.uint8:  # inputs 0 to 15 of a group in the low bits, each weight plus 8
        low_and_high = blocks & 15, blocks >> 4
        blocks = np.concatenate(low_and_high, axis=2).astype(np.int32) - 8
    weights = blocks.transpose(1, 2, 4, 0, 3).reshape(groups, GROUP, columns).astype(np.int32)
    factors = factors.swapaxes(0, 1).reshape(groups, columns).astype(np.float32)
    total = np.zeros(columns, np.float32)
    for group, (values, scale) in enumerate(zip(*rounded(row), strict=True)):
        sums = (values @ weights[group]).astype(np.longdouble)
        total = (sums * (scale * factors[group]) + total).astype(np.float32)
    return total


def rounded(row):
    """The 8-bit values `[groups, 32]` of a row `[I]`, and their float32 scales `[groups]`.

    A scale is the largest magnitude of its group / 127, and a value the nearest, halves to even. A
    group whose largest is below 2^-100 counts as zeros, with scale 0: denormal numbers, which
    threads of XLA take for zero, make no difference. A group with NaN or infinity has the scale
    NaN, so all products of such a row are NaN.
    """
    row = np.pad(row.astype(np.float32), (0, -len(row) % GROUP)).reshape(-1, GROUP)
    largest = np.abs(row).max(axis=1, initial=0)
    scales = np.where(largest < 2.0**-100, np.float32(0), largest / np.float32(127))
    scales[~np.isfinite(largest)] = np.nan
    values = np.zeros(row.shape, np.int32)
    some = scales > 0
    values[some] = np.rint(row[some] / scales[some, None])
    return values, scales
