"""Matrices in 8 or 4 bits, with a scale for 32 inputs of a column."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.numerics import static

GROUP = 32  # inputs with one scale, of a column and of a row
KINDS = {"int8": jnp.bfloat16, "int4": jnp.float16}  # of values, and their scales
_BYTES = 64 << 20  # of columns that are quantised at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix `[I, O]`, several `[E, I, O]`, or a table `[V, M]`, in 8 or 4 bits.

    A weight is its value times the scale of its group. That product is exact in float32, and in
    bfloat16 rounded once.

    In 8 bits the largest weight of a group is 126 or 127 times its scale, which is rounded up to
    bfloat16. In 4 bits it is -8 times its scale, which may be negative and is rounded to float16:
    the numbers of llama.cpp's Q4_0.

    Attributes:
        values: int8 or int4, in the shape of the matrix. A CPU has a byte for an int4, too.
        scales: bfloat16 for int8, float16 for int4, in this shape with `ceil(I / 32)` instead of
            `I`.
        axis: the axis of inputs: -2, or -1 of a table, whose rows are multiplied.
        dtype: float32 or bfloat16, of what it is widened to.
    """

    values: Any  # an array, or what jax puts in its place
    scales: Any
    axis: int = static(-2)
    dtype: Any = static(np.dtype(np.float32))

    @classmethod
    def of(cls, matrix: Any, axis: int = -2, kind: str = "int8") -> "QuantizedMatrix":
        """The nearest values of a matrix in a kind, on the host; of an abstract one abstract.

        NaN and infinity give such scales.
        """
        shape = list(matrix.shape)
        shape[axis] = -(-shape[axis] // GROUP)
        if isinstance(matrix, jax.ShapeDtypeStruct):
            abstract = jax.ShapeDtypeStruct(matrix.shape, jnp.dtype(kind))
            return cls(abstract, jax.ShapeDtypeStruct(shape, KINDS[kind]), axis, matrix.dtype)
        host = np.asarray(matrix)
        values, scales = np.empty(host.shape, jnp.dtype(kind)), np.empty(shape, KINDS[kind])
        # Views with the inputs second to last.
        source, into, steps = (np.moveaxis(each, axis, -2) for each in (host, values, scales))
        rows = source.size // max(source.shape[-1], 1)
        width = max(_BYTES // (4 * max(rows, 1)), 1)
        for start in range(0, source.shape[-1], width):  # float32 copies take memory
            part = np.s_[..., start : start + width]
            into[part], steps[part] = _rounded(source[part].astype(np.float32), kind)
        return cls(values, scales, axis, host.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.values.shape

    @property
    def kind(self) -> str:
        """The type of its values, "int8" or "int4"."""
        return jnp.dtype(self.values.dtype).name

    @property
    def T(self) -> "QuantizedMatrix":
        """A table as a matrix, or the reverse."""
        values, scales = self.values.T, self.scales.T
        return dataclasses.replace(self, values=values, scales=scales, axis=-3 - self.axis)

    def __getitem__(self, index: Any) -> Float[Array, "..."]:
        """Rows of a table, or columns of a matrix after `...`, widened."""
        values, scales = self.values[index], self.scales[index]
        return dataclasses.replace(self, values=values, scales=scales).wide()

    def wide(self) -> Float[Array, "..."]:
        """The matrix in its `dtype`."""
        size = self.shape[self.axis]
        wide = self.dtype if self.kind == "int8" else jnp.float32  # a float16 is no bfloat16
        scales = jnp.repeat(self.scales.astype(wide), GROUP, axis=self.axis)
        scales = jax.lax.slice_in_dim(scales, 0, size, axis=self.axis % scales.ndim)
        return (self.values.astype(wide) * scales).astype(self.dtype)

    def wide_for(self, x: Array) -> tuple[Array, Array]:
        """The rows of a product and the matrix in its `dtype`.

        Without this barrier XLA would widen it once for several products, and hold the copy.
        """
        values, scales, x = jax.lax.optimization_barrier((self.values, self.scales, x))
        return x, dataclasses.replace(self, values=values, scales=scales).wide()


def in_groups(matrix: np.ndarray) -> np.ndarray:
    """`[*E, I, O]` in groups of inputs `[*E, groups, 32, O]`; what is missing is zeros."""
    *several, size, columns = matrix.shape
    if size % GROUP:
        matrix = np.pad(matrix, [(0, 0)] * len(several) + [(0, -size % GROUP), (0, 0)])
    return matrix.reshape(*several, -(-size // GROUP), GROUP, columns)


def _rounded(matrix: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The values and scales of a float32 `[*E, I, O]`."""
    *several, size, columns = matrix.shape
    grouped = in_groups(matrix)
    most, least = grouped.max(axis=-2), grouped.min(axis=-2)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity, which the scales tell
        if kind == "int4":
            bounds = -8, 7
            scales = (np.where(most > -least, most, least) / np.float32(-8)).astype(np.float16)
        else:
            bounds = -127, 127
            scales = _up_to_bfloat16(np.maximum(most, -least) / np.float32(127))
        steps = scales.astype(np.float32)
        grouped = grouped / np.where(steps != 0, steps, 1)[..., None, :]
        # A scale of few bits, as of tiny numbers, would give more.
        whole = np.clip(np.rint(grouped, out=grouped), *bounds, out=grouped).astype(np.int8)
    return whole.reshape(*several, -(-size // GROUP) * GROUP, columns)[..., :size, :], scales


def _up_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Positive numbers in float32, the next that bfloat16 has; the last 16 bits are zeros."""
    bits = (x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), bits.view(np.float32), x)
