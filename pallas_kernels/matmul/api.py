"""Products of rows with matrices, exact to the bit for any number of rows.

On a CPU of packed matrices in every type, on a GPU of unpacked ones in bfloat16 and in 8 bits.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Num

from pallas_kernels import dispatch
from pallas_kernels.matmul import native, pallas_triton, xla
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.matmul.quantized import QuantizedMatrix
from pallas_kernels.numerics import DeferredRMSNorm, PartialSums, Product, gated, total
from pallas_kernels.rms_norm.api import GatedNorm


def matmul(
    x: Float[Array, "*rows I"],
    matrix: PackedMatrix | QuantizedMatrix | Num[Array, "..."],
    which: Int[Array, " rows"] | None = None,
    *,
    axis: int = -2,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """Rows times a matrix, `[*rows, O]`, added in float32 whatever the type of the matrix.

    Args:
        x: the rows.
        matrix: one matrix `[I, O]`, packed or not; with `which` several packed ones, `[E, I, O]`.
            XLA multiplies rows by each of several others, `[*rows, E, O]`.
        which: the matrix of each row of `x [rows, I]`; all must be in range. None: there is one.
        axis: the axis of inputs of an array: -2, or -1 of a table `[O, I]`.
        dtype: of the products, float32 or bfloat16; packed ones are float32.
        implementation: a name from `dispatch.IMPLEMENTATIONS`; None: the fastest that runs here.
            Packed matrices have "native", the others "pallas".

    Returns:
        "native" adds in one order: a row's product is the same to the bit for any number of rows,
        and rows of zeros, as padding is, take no time. For weights in 8 or 4 bits it rounds rows to
        8 bits in groups of 32 inputs; a row with NaN or infinity gives NaN. "xla" rounds rows to
        bfloat16 for a packed bfloat16 matrix, and an unpacked matrix of few bits to its `dtype`.
        "pallas" multiplies bfloat16 rows, and adds in one order too. More than 64 rows are XLA's,
        which is faster then, but for traces inside of `dispatch.to_the_bit(True)`.
        Derivatives are XLA's in all implementations.

    Raises:
        ValueError: rows that do not fit the matrix.
    """
    is_packed = isinstance(matrix, PackedMatrix)
    axis = -2 if is_packed else getattr(matrix, "axis", axis)
    if x.shape[-1] != matrix.shape[axis]:
        raise ValueError(f"rows of {x.shape[-1]} inputs do not fit a matrix {matrix.shape}")
    several = is_packed and len(matrix.shape) == 3
    if several != (which is not None) or (which is not None and x.shape[:-1] != which.shape):
        raise ValueError(
            f"which = {which if which is None else which.shape} with x {x.shape} and a matrix"
            f" {matrix.shape}: rows [rows, I] of several packed matrices [E, I, O] need which"
            " [rows]"
        )
    count = math.prod(x.shape[:-1])
    if isinstance(matrix, PackedMatrix):
        rows = x.reshape(count, x.shape[-1]).astype("float32")
        y = dispatch.run(
            "matmul",
            {"xla": xla, "native": native},
            (rows, matrix, which),
            requested=implementation,
            xla_derivatives=True,
        )
        return y.reshape(*x.shape[:-1], matrix.columns)
    return total(partial_sums(x, matrix, axis=axis, dtype=dtype, implementation=implementation))


def partial_sums(
    x: Float[Array, "*rows I"] | GatedNorm,
    matrix: QuantizedMatrix | Num[Array, "..."],
    *,
    axis: int = -2,
    dtype: DTypeLike = jnp.float32,
    gate: str | None = None,
    implementation: str | None = None,
) -> Product:
    """`matmul` of an unpacked matrix for a kernel that adds up parts while it loads them.

    A kernel of few rows computes a `GatedNorm` itself. It returns `PartialSums` where "pallas"
    multiplies in parts. With a `gate`, an activation, it returns `numerics.gated` of the product.
    Other arguments are those of `matmul`.
    """
    axis, count = getattr(matrix, "axis", axis), math.prod(x.shape[:-1])
    dtype = jnp.dtype(dtype)
    if gate is not None and not pallas_triton.gates(x.shape[-1], matrix.shape[-3 - axis]):
        y = matmul(total(x), matrix, axis=axis, dtype=dtype, implementation=implementation)
        return gated(gate, y)
    versions: dict[str, Any] = {"xla": xla.unpacked}
    if 0 < count <= pallas_triton.MOST_ROWS or (count and dispatch.wants_bits()):
        versions["pallas"] = pallas_triton.matmul
    return dispatch.run(
        "matmul",
        versions,
        (x, matrix),
        requested=implementation,
        unsupported={"pallas": pallas_triton.unsupported(x, matrix, axis)},
        axis=axis,
        dtype=dtype,
        gate=gate,
    )


def normed_product(
    residual: Float[Array, "*rows I"],
    output: Float[Array, "*rows I"] | PartialSums | DeferredRMSNorm,
    weight: Float[Array, " I"],
    matrix: QuantizedMatrix | Num[Array, "..."],
    *,
    epsilon: float,
    multiplier: float = 1.0,
    axis: int = -2,
    gate: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows I"], Float[Array, "*rows I"], Product] | None:
    """`add_rms_norm` and `partial_sums` of the norm as one kernel, for few rows of small models.

    Args:
        residual, output, weight, epsilon, multiplier: as in `add_rms_norm`.
        matrix, axis, gate, implementation: as in `partial_sums`.

    Returns:
        The sum, its norm, and the product in the dtype of the norm, with the bits of the two ops.
        None if they have to be two: their kernels do not run here, or each program of the product
        would have too much to norm.
    """
    x = pallas_triton.NormedSum(residual, output, weight, epsilon, multiplier)
    axis = getattr(matrix, "axis", axis)

    def fits() -> bool:
        return pallas_triton.begins_with(x, matrix, axis, gate)

    with dispatch.kernel("normed_product", implementation, fits, (x, matrix)) as interpret:
        if interpret is None:
            return None
        options = dict(axis=axis, dtype=x.dtype, gate=gate, interpret=interpret)
        return pallas_triton.partial_sums(x, matrix, **options)


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
