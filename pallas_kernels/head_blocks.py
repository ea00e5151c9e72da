"""What a program sees in a grid of rows, heads and blocks of a head's channels.

Kernels that own a part of the state have such a grid: `replay`, `replay_tree_scan`, `mamba2_tree`
and `ssd`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import triton as tb


def channels_of(numbers: int, head_dim: int, state_size: int) -> int:
    """Channels of a block with about so many numbers of the state."""
    return min(head_dim, max(tb.SMALLEST_BLOCK, numbers // state_size))


def in_any_place(block: pl.BlockSpec, num_places: int) -> pl.BlockSpec:
    """The block of every place, where an array has an axis of places in front."""
    shape, index_map = block.block_shape, block.index_map
    assert shape is not None
    assert index_map is not None
    return pl.BlockSpec((num_places, *shape), lambda *program: (0, *index_map(*program)))


@dataclasses.dataclass(frozen=True)
class AtPlace:
    """A ref with an axis of places in front, as the ref of what is at one of them.

    Attributes:
        ref: of all places.
        place: a number.
    """

    ref: Any
    place: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the places."""
        return self.ref.shape[1:]

    @property
    def dtype(self) -> Any:
        """Of the numbers."""
        return self.ref.dtype

    def __getitem__(self, index: Any) -> Any:
        return self.ref[self._of_all(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.ref[self._of_all(index)] = value

    def _of_all(self, index: Any) -> tuple:
        return (self.place, *index) if isinstance(index, tuple) else (self.place, index)


@dataclasses.dataclass(frozen=True)
class HeadBlocks:
    """Blocks of arrays for the program of row b, head h and the p-th block of its channels.

    Attributes:
        channels: of a block.
        state_size: `S`.
        heads_per_group: head h uses group `h // heads_per_group`.
        block: which block of channels program p works on.
    """

    channels: int
    state_size: int
    heads_per_group: int
    block: Callable[[Any], Any] = lambda p: p

    def of_channels(self, length: int) -> pl.BlockSpec:
        """Of `[B, length, H, P]`."""
        return pl.BlockSpec(
            (None, length, None, self.channels), lambda b, h, p: (b, 0, h, self.block(p))
        )

    def of_head(self, length: int) -> pl.BlockSpec:
        """Of `[B, length, H]`."""
        return pl.BlockSpec((None, length, None), lambda b, h, p: (b, 0, h))

    def of_group(self, length: int) -> pl.BlockSpec:
        """Of `[B, length, G, S]`."""
        return pl.BlockSpec(
            (None, length, None, self.state_size),
            lambda b, h, p: (b, 0, h // self.heads_per_group, 0),
        )

    @property
    def state(self) -> pl.BlockSpec:
        """Of `[B, H, P, S]`."""
        return pl.BlockSpec(
            (None, None, self.channels, self.state_size),
            lambda b, h, p: (b, h, self.block(p), 0),
        )

    @property
    def one_of_heads(self) -> pl.BlockSpec:
        """Of `[H]`."""
        return pl.BlockSpec((None,), lambda b, h, p: (h,))

    @property
    def skip(self) -> pl.BlockSpec:
        """Of `[H, P]`."""
        return pl.BlockSpec((None, self.channels), lambda b, h, p: (h, self.block(p)))
