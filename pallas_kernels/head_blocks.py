"""Blocks of arrays in a grid of rows, heads and blocks of a head's channels."""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.numerics import PartialSums


def channels_of(numbers: int, head_dim: int, state_size: int) -> int:
    """Channels per block: at most `numbers` elements of the state, but at least 16 channels."""
    return min(head_dim, max(tb.SMALLEST_BLOCK, numbers // state_size))


@dataclasses.dataclass(frozen=True)
class HeadBlocks:
    """Blocks of arrays for the program of row b, head h and the p-th block of its channels."""

    channels: int  # channels per block
    heads_per_group: int  # head h uses group `h // heads_per_group`

    def of(self, array: Any, axes: str, first_head: int = 0) -> tuple[Any, pl.BlockSpec]:
        """An array and its block: all of an axis ".", and this program's place on others.

        These are rows "b", heads "h" from `first_head` on, and groups "g"; of channels "p" it is a
        block. A program has all parts of `PartialSums`.
        """
        if isinstance(array, PartialSums):
            return array, self.of(array.parts, "." + axes, first_head)[1]
        sizes = {"p": self.channels, "b": None, "h": None, "g": None}
        shape = (sizes.get(axis, size) for axis, size in zip(axes, array.shape, strict=True))

        def place(b: Any, h: Any, p: Any) -> tuple[Any, ...]:
            at = {"b": b, "h": h + first_head, "g": h // self.heads_per_group, "p": p, ".": 0}
            return tuple(at[axis] for axis in axes)

        return array, pl.BlockSpec(tuple(shape), place)
