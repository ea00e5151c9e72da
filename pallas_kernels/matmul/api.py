"""Products of rows with packed matrices, exact to the bit for any number of rows on a CPU."""

import math

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import dispatch
from pallas_kernels.matmul import native, xla
from pallas_kernels.matmul.packed import PackedMatrix


def matmul(
    x: Float[Array, "*rows I"],
    matrix: PackedMatrix,
    which: Int[Array, " rows"] | None = None,
    *,
    implementation: str | None = None,
) -> Float32[Array, "*rows O"]:
    """Rows times a packed matrix, in float32 whatever the type of the matrix.

    Args:
        x: the rows.
        matrix: one matrix `[I, O]`; with `which` several, `[E, I, O]`.
        which: the matrix of each row of `x [rows, I]`; all must be in range. None: there is one.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.

    Returns:
        Products and sums in float32. "native" adds in one order: a row's product is the same to the
        bit for any number of rows, and rows of zeros, as padding is, take no time. For 8-bit
        weights it rounds rows to 8 bits in groups of 32 inputs; a row with NaN or infinity gives
        NaN. "xla" rounds rows to bfloat16 for a bfloat16 matrix.
        Derivatives are XLA's in all implementations.

    Raises:
        ValueError: rows that do not fit the matrix.
    """
    several = len(matrix.shape) == 3
    if x.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"rows of {x.shape[-1]} inputs do not fit a matrix {matrix.shape}")
    if several != (which is not None) or (which is not None and x.shape[:-1] != which.shape):
        raise ValueError(
            f"which = {which if which is None else which.shape} with x {x.shape} and a matrix"
            f" {matrix.shape}: rows [rows, I] of several matrices [E, I, O] need which [rows]"
        )
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype("float32")
    arguments = (rows, matrix) if which is None else (rows, matrix, which)
    y = dispatch.run(
        "matmul",
        {"xla": xla, "native": native},
        arguments,
        requested=implementation,
        xla_derivatives=True,
    )
    return y.reshape(*x.shape[:-1], matrix.columns)


def rows(
    matrix: PackedMatrix, index: Int[Array, "*rows"], *, implementation: str | None = None
) -> Float32[Array, "*rows I"]:
    """Columns of a packed matrix `[I, O]`, which are rows of an embedding `[O, I]`.

    An index that is out of range is the nearest in range, as XLA's gather has it. XLA widens all of
    a bfloat16 matrix first.
    """
    return dispatch.run(
        "rows",
        {"xla": xla, "native": native},
        (matrix, index),
        requested=implementation,
        xla_derivatives=True,
    )
