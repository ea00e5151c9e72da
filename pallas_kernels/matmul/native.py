"""`matmul` by our own code, `native.cc`."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float32, Int

from pallas_kernels import native
from pallas_kernels.matmul.packed import COLUMNS, PackedMatrix


def matmul(
    x: Float32[Array, "rows I"], matrix: PackedMatrix, which: Int[Array, " rows"] | None = None
) -> Float32[Array, "rows O"]:
    """See `api.matmul`. A row's product is the same to the bit for any number of rows."""
    blocks, scales = (
        array if array is None or which is not None else array[None]
        for array in (matrix.blocks, matrix.scales)
    )
    scales = jnp.zeros(0, jnp.float32) if scales is None else scales
    index = jnp.zeros(0, jnp.int32) if which is None else which.astype(jnp.int32)
    first_block, skipped = divmod(matrix.first, COLUMNS)
    columns = skipped + matrix.columns

    @custom_vmap
    def product(x: jax.Array, blocks: jax.Array, scales: jax.Array, index: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
        return native.call("matmul", result, x, blocks, scales, index, first_block=first_block)

    @product.def_vmap
    def batched(size: int, is_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        """Rows of a batch are rows; a batch of matrices is a loop."""
        x, blocks, scales, index = arrays
        if not any(is_batched[1:]):
            rows = x.reshape(size * x.shape[1], x.shape[2])
            y = product(rows, blocks, scales, jnp.tile(index, size))
            return y.reshape(*x.shape[:2], columns), True
        whole = [
            array if batched else jnp.broadcast_to(array, (size, *array.shape))
            for array, batched in zip(arrays, is_batched, strict=True)
        ]
        return lax.map(lambda each: product(*each), whole), True

    return product(x, blocks, scales, index)[:, skipped:]


def rows(matrix: PackedMatrix, index: Int[Array, "*rows"]) -> Float32[Array, "*rows I"]:
    """See `api.rows`."""
    result = jax.ShapeDtypeStruct((index.size, matrix.shape[0]), jnp.float32)
    arrays = matrix.blocks, matrix.scales, index.astype(jnp.int32).reshape(index.size)
    found = native.call("rows", result, *arrays, first=matrix.first, columns=matrix.columns)
    return found.reshape(*index.shape, matrix.shape[0])
