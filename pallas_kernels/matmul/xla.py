"""`matmul` as XLA operations."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

from pallas_kernels.matmul.packed import COLUMNS, PackedMatrix, scaled
from pallas_kernels.matmul.quantized import GROUP, LEAST

_MOST_ROWS = 256  # that are multiplied by blocks; more are multiplied by the whole matrix


def matmul(
    x: Float32[Array, "rows I"], matrix: PackedMatrix, which: Int[Array, " rows"] | None = None
) -> Float32[Array, "rows O"]:
    """See `api.matmul`; rows are rounded to bfloat16 for a bfloat16 matrix.

    Products of rows that are rounded to 8 bits are in float32, in any order. XLA would widen such a
    matrix as a whole, and hold the copy.
    """
    x = x if matrix.scales is None else rounded(x)
    return _product(x, matrix, which)


@jax.custom_jvp
def rounded(x: Float32[Array, "rows I"]) -> Float32[Array, "rows I"]:
    """Rows rounded to 8 bits in groups of 32 inputs; derivatives are those of `x`."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = padded.reshape(len(x), padded.shape[1] // GROUP, GROUP)
    largest = jnp.abs(groups).max(axis=-1, keepdims=True)
    # XLA would multiply with the inverse of a constant.
    steps = largest / lax.optimization_barrier(jnp.float32(127))
    steps = jnp.where(largest < LEAST, 0, jnp.where(jnp.isfinite(largest), steps, jnp.nan))
    values = jnp.round(groups / jnp.where(steps == 0, jnp.inf, steps))
    return (values * steps).reshape(padded.shape)[:, : x.shape[1]]


@rounded.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return rounded(*primals), *tangents


def _product(x: jax.Array, matrix: PackedMatrix, which: jax.Array | None) -> jax.Array:
    """`matmul` without rounding to 8 bits."""
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


def rows(matrix: PackedMatrix, index: Int[Array, "*rows"]) -> Float32[Array, "*rows I"]:
    """See `api.rows`."""
    index = matrix.first + jnp.clip(index, 0, matrix.columns - 1)
    block, column = index // COLUMNS, index % COLUMNS
    if matrix.scales is None:
        return matrix.blocks[block, :, column].astype(jnp.float32)
    found = matrix.blocks[block, :, :, column].astype(jnp.float32)
    factors = matrix.scales[block, :, column, None, None]
    whole = (found * factors).reshape(*index.shape, math.prod(found.shape[index.ndim :]))
    return whole[..., : matrix.inputs]


def _of_choice(matrix: PackedMatrix, row: jax.Array, index: jax.Array) -> jax.Array:
    """A row times one of several matrices."""
    one = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), matrix)
    return _product(row[None], one, None)[0]


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
