"""Matrices in blocks of 32 columns, as a CPU reads them in order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from pallas_kernels.matmul.quantized import GROUP, KINDS, QuantizedMatrix, in_groups
from pallas_kernels.numerics import static

COLUMNS = 32  # of a block
_ALIGNMENT, _LARGE_PAGE = 64, 1 << 21  # bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[I, O]`, or several `[E, I, O]`, in blocks of 32 columns.

    Attributes:
        blocks: `[*E, blocks, I, 32]`, float32 or bfloat16; of 8-bit weights int8 `[*E, blocks,
            ceil(I / 32), 16, 32, 2]`: pairs of inputs; of 4-bit weights uint8 `[*E, blocks,
            ceil(I / 32), 4, 32, 4]`: byte `[q, :, i]` of a group is input 4 q + i in its low bits
            and input 16 + 4 q + i in its high bits, each plus 8. What is missing is zeros.
        scales: factors of 8-bit weights, bfloat16, or 4-bit weights, float16, `[*E, blocks,
            ceil(I / 32), 32]`: one for 32 inputs of a column; None: none.
        inputs: I.
        columns: O.
        first: the first column; a multiple of 32 unless the matrix is `cut`.
    """

    blocks: Any  # an array, or what jax puts in its place
    scales: Any
    inputs: int = static()
    columns: int = static()
    first: int = static(0)

    @classmethod
    def pack(cls, matrix: Any, dtype: DTypeLike | None = None) -> "PackedMatrix":
        """Packs a matrix on the host.

        Args:
            matrix: `[I, O]` or `[E, I, O]`, or one in 8 or 4 bits.
            dtype: float32, bfloat16, int8 or int4; None: that of the matrix.

        Raises:
            ValueError: another shape or dtype.
        """
        if isinstance(matrix, QuantizedMatrix):
            grouped = in_groups(_blocks(np.asarray(matrix.values).astype(np.int8)))
            scales, shape = _blocks(np.asarray(matrix.scales)), grouped.shape[:-2]
            if matrix.kind == "int4":
                halves = (grouped + 8).astype(np.uint8).reshape(*shape, 2, 4, 4, COLUMNS)
                nibbles = halves[..., 0, :, :, :] | halves[..., 1, :, :, :] << 4
                blocks = _on_large_pages(nibbles.swapaxes(-1, -2), np.uint8)
            else:
                pairs = grouped.reshape(*shape, GROUP // 2, 2, COLUMNS).swapaxes(-1, -2)
                blocks = _on_large_pages(pairs, np.int8)
            return cls(blocks, jnp.asarray(scales), *matrix.shape[-2:])
        host = np.asarray(matrix)
        dtype = jnp.dtype(host.dtype if dtype is None else dtype)
        if host.ndim not in (2, 3) or dtype.name not in ("float32", "bfloat16", *KINDS):
            raise ValueError(
                f"a matrix [I, O] or [E, I, O] is packed as float32, bfloat16, int8 or int4, got"
                f" {host.shape} as {dtype.name}"
            )
        if dtype.name in KINDS:
            return cls.pack(QuantizedMatrix.of(host, kind=dtype.name))
        return cls(_on_large_pages(_blocks(host), dtype), None, *host.shape[-2:])

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix, `[*E, I, O]`."""
        several = self.blocks.shape[: -3 if self.scales is None else -5]
        return (*several, self.inputs, self.columns)

    @property
    def kind(self) -> str | None:
        """Of weights in few bits: "int8" or "int4". None: they have a float type."""
        return {"int8": "int8", "uint8": "int4"}.get(jnp.dtype(self.blocks.dtype).name)

    @property
    def dtype(self) -> Any:
        """That of its weights."""
        return self.blocks.dtype

    def cut(self, start: int, stop: int) -> "PackedMatrix":
        """Its columns from `start` to `stop`; nothing is copied.

        Raises:
            ValueError: they are not among its columns.
        """
        if not 0 <= start <= stop <= self.columns:
            raise ValueError(f"columns {start} to {stop} of {self.columns}")
        return dataclasses.replace(self, columns=stop - start, first=self.first + start)

    def used(self) -> tuple[Num[Array, "*E blocks I 32"], Array | None]:
        """The blocks with its columns, inputs in order, and their scales."""
        blocks = slice(self.first // COLUMNS, -(-(self.first + self.columns) // COLUMNS))
        if self.scales is None:
            return self.blocks[..., blocks, :, :], None
        parts = self.blocks[..., blocks, :, :, :, :]
        *several, groups, _, _, _ = parts.shape
        whole = numbers(parts, axis=-4).swapaxes(-1, -2).reshape(*several, GROUP * groups, COLUMNS)
        return whole[..., : self.inputs, :], self.scales[..., blocks, :, :]

    def canonical(self) -> Num[Array, "*E I O"]:
        """The matrix `[*E, I, O]`, weights of few bits as float32."""
        blocks, scales = self.used()
        return self._columns(blocks if scales is None else scaled(blocks, scales))

    def quantized(self) -> QuantizedMatrix:
        """The matrix `[*E, I, O]` of weights in 8 or 4 bits."""
        values, scales = map(self._columns, self.used())
        return QuantizedMatrix(values.astype(self.kind), scales.astype(KINDS[self.kind or ""]))

    def _columns(self, blocks: Any) -> Num[Array, "*E I O"]:
        """Its columns of an array in blocks."""
        *several, count, size, width = blocks.shape
        whole = jnp.moveaxis(blocks, -3, -2).reshape(*several, size, count * width)
        skipped = self.first % COLUMNS
        return whole[..., skipped : skipped + self.columns]


def _blocks(host: np.ndarray) -> np.ndarray:
    """A view of `[*E, I, O]` in blocks `[*E, blocks, I, 32]`."""
    count = -(-host.shape[-1] // COLUMNS)
    missing = count * COLUMNS - host.shape[-1]
    padded = np.pad(host, [(0, 0)] * (host.ndim - 1) + [(0, missing)])
    cut = padded.reshape(*host.shape[:-1], count, COLUMNS)
    return np.moveaxis(cut, -2, -3)


def _on_large_pages(values: np.ndarray, dtype: DTypeLike) -> Array:
    """A copy whose memory begins a page of 2 MB.

    NumPy asks Linux for such pages in large arrays, and jax takes an aligned array as it is.
    Reading 400 MB of weights is a fifth faster: fewer addresses are looked up.
    """
    count = values.size * np.dtype(dtype).itemsize
    alignment = _LARGE_PAGE if count >= _LARGE_PAGE else _ALIGNMENT
    raw = np.empty(count + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    copy = raw[start : start + count].view(dtype).reshape(values.shape)
    copy[...] = values
    return jax.device_put(copy)


def numbers(parts: Array, axis: int) -> Array:
    """The int8 values of a part of blocks of few bits; halves of 4-bit ones on a new axis."""
    if parts.dtype == jnp.int8:
        return parts
    return jnp.stack([parts & 15, parts >> 4], axis).astype(jnp.int8) - 8


def scaled(blocks: Array, scales: Array) -> Array:
    """The blocks in float32, times the scales."""
    scales = jnp.repeat(scales.astype(jnp.float32), GROUP, axis=-2)[..., : blocks.shape[-2], :]
    return blocks.astype(jnp.float32) * scales
