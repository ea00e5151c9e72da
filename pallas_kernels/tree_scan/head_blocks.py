"""Blocks of arrays in a grid of rows, heads and blocks of a head's channels."""

import dataclasses

import jax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb


def channels_of(numbers: int, head_dim: int, state_size: int) -> int:
    """Channels per block: at most `numbers` elements of the state, but at least 16 channels."""
    return min(head_dim, max(tb.SMALLEST_BLOCK, numbers // state_size))


@dataclasses.dataclass(frozen=True)
class HeadBlocks:
    """Blocks of arrays for the program of row b, head h and the p-th block of its channels."""

    channels: int  # channels per block
    state_size: int  # `S`
    heads_per_group: int  # head h uses group `h // heads_per_group`

    def of_row(self, array: jax.Array) -> pl.BlockSpec:
        """All of a row of `[B, ...]`."""
        return tb.spec(array, "b..."[: array.ndim], "bhp")

    def of_channels(self, length: int) -> pl.BlockSpec:
        """Blocks of `[B, length, H, P]`."""
        return pl.BlockSpec((None, length, None, self.channels), lambda b, h, p: (b, 0, h, p))

    def of_head(self, length: int) -> pl.BlockSpec:
        """Blocks of `[B, length, H]`."""
        return pl.BlockSpec((None, length, None), lambda b, h, p: (b, 0, h))

    def of_group(self, length: int) -> pl.BlockSpec:
        """Blocks of `[B, length, G, S]`."""
        return pl.BlockSpec(
            (None, length, None, self.state_size),
            lambda b, h, p: (b, 0, h // self.heads_per_group, 0),
        )

    @property
    def state(self) -> pl.BlockSpec:
        """Blocks of `[B, H, P, S]`."""
        return pl.BlockSpec(
            (None, None, self.channels, self.state_size), lambda b, h, p: (b, h, p, 0)
        )

    @property
    def one_of_heads(self) -> pl.BlockSpec:
        """Blocks of `[H]`."""
        return pl.BlockSpec((None,), lambda b, h, p: (h,))

    @property
    def skip(self) -> pl.BlockSpec:
        """Blocks of `[H, P]`."""
        return pl.BlockSpec((None, self.channels), lambda b, h, p: (h, p))
