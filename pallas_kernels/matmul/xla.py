"""`matmul` as XLA operations."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Num

from pallas_kernels import dispatch
from pallas_kernels.matmul.packed import COLUMNS, PackedMatrix, numbers, scaled
from pallas_kernels.matmul.quantized import GROUP, QuantizedMatrix
from pallas_kernels.numerics import gated

_MOST_ROWS = 256  # that are multiplied by blocks; more are multiplied by the whole matrix


def matmul(
    x: Float32[Array, "rows I"], matrix: PackedMatrix, which: Int[Array, " rows"] | None = None
) -> Float32[Array, "rows O"]:
    """See `api.matmul`; rows are rounded to bfloat16 for a bfloat16 matrix, and not to 8 bits.

    The order of sums depends on the number of rows here, and rounding to 8 bits would make of 1e-7
    another step. XLA would widen a bfloat16 matrix as a whole, and hold the copy.
    """
    if which is not None:
        return lax.map(lambda row: _of_choice(matrix, *row), (x, which))
    if len(x) > _MOST_ROWS:
        return _dot(x, matrix.canonical(), ())
    blocks, scales = matrix.used()
    wide = blocks if scales is None else scaled(blocks, scales)
    # XLA's bfloat16 product of one row takes seven times as long as that of two.
    rows = jnp.pad(x, ((0, 1), (0, 0))) if len(x) == 1 and wide.dtype == jnp.bfloat16 else x
    y = _dot(jnp.broadcast_to(rows, (len(wide), *rows.shape)), wide, (0,))
    y = y.swapaxes(0, 1).reshape(len(rows), len(wide) * COLUMNS)[: len(x)]
    skipped = matrix.first % COLUMNS
    return y[:, skipped : skipped + matrix.columns]


def unpacked(
    x: Float[Array, "*rows I"],
    matrix: Num[Array, "..."] | QuantizedMatrix,
    *,
    axis: int,
    dtype: DTypeLike,
    gate: str | None = None,
) -> Float[Array, "..."]:
    """See `api.partial_sums`, of a matrix that is not packed; of several matrices, rows times each.

    XLA's default for float32 on a GPU is TF32. Asked for more in bfloat16 too, which has no more,
    it took twice as long for the products of a single row. (In 8 bits it multiplies such a row
    without writing the matrix in bfloat16 first; no device has timed that.)
    """
    is_quantized = isinstance(matrix, QuantizedMatrix)
    x, wide = matrix.wide_for(x) if isinstance(matrix, QuantizedMatrix) else (x, matrix)
    exact = is_quantized or jnp.result_type(x, wide) == jnp.float32
    # A TPU multiplies one row without its matrix units, which takes longer than reading the matrix.
    pads = dispatch.on_tpu() and x.ndim > 1 and math.prod(x.shape[:-1]) == 1
    y = jnp.tensordot(
        jnp.pad(x, [(0, 1), *[(0, 0)] * (x.ndim - 1)]) if pads else x,
        wide,
        axes=((x.ndim - 1,), (wide.ndim + axis,)),
        precision="highest" if exact else None,
        preferred_element_type=dtype,
    )
    y = y[:1] if pads else y
    return y if gate is None else gated(gate, y)


def rows(matrix: PackedMatrix, index: Int[Array, "*rows"]) -> Float32[Array, "*rows I"]:
    """See `api.rows`."""
    index = matrix.first + jnp.clip(index, 0, matrix.columns - 1)
    block, column = index // COLUMNS, index % COLUMNS
    if matrix.scales is None:
        return matrix.blocks[block, :, column].astype(jnp.float32)
    # [*rows, groups, pairs or quarters, 2 or 4]
    values = numbers(matrix.blocks[block, :, :, column], axis=-3)
    grouped = values.reshape(*index.shape, values.shape[index.ndim], GROUP).astype(jnp.float32)
    whole = grouped * matrix.scales[block, :, column, None].astype(jnp.float32)
    return whole.reshape(*index.shape, math.prod(whole.shape[-2:]))[..., : matrix.inputs]


def _of_choice(matrix: PackedMatrix, row: jax.Array, index: jax.Array) -> jax.Array:
    """A row times one of several matrices."""
    one = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), matrix)
    return matmul(row[None], one)[0]


def _dot(left: jax.Array, right: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """`left @ right` over leading batch axes, exact in float32; bfloat16 sums in float32."""
    exact = right.dtype == jnp.float32
    return lax.dot_general(
        left.astype(right.dtype),
        right,
        (((left.ndim - 1,), (right.ndim - 2,)), (batch, batch)),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
