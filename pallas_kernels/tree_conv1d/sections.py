"""Sections of the conv channels: their columns in the projection and in the outputs."""

import dataclasses

import jax
from jax import lax

from pallas_kernels.tree_conv1d.layout import Mamba2Layout


@dataclasses.dataclass(frozen=True)
class Section:
    """Neighbouring channels of the convolution that go to one output."""

    output: str
    channel: int  # first channel in the convolution and first column in the inputs
    column: int
    head_size: int  # channels per head (x) or per group (B and C)
    # Heads or groups in the inputs, in the convolution and in the output; from one
    # to the next, each is repeated
    input_heads: int
    conv_heads: int
    output_heads: int
    multiplier: float  # factor of the inputs
    pending: bool  # whether the output has rows for the prefix nodes too

    @property
    def size(self) -> int:
        """Channels of the convolution."""
        return self.conv_heads * self.head_size

    @property
    def largest_block(self) -> int:
        """A divisor of this many channels is a valid block: it never spans copied heads."""
        copied = self.input_heads != self.conv_heads or self.conv_heads != self.output_heads
        return self.head_size if copied else self.size

    def column_of(self, channel: jax.Array) -> jax.Array:
        """The input column of a channel of the section."""
        if self.input_heads == self.conv_heads:
            return self.column + channel
        head = lax.div(channel, self.conv_heads // self.input_heads * self.head_size)
        return self.column + head * self.head_size + lax.rem(channel, self.head_size)

    def copies_of(self, channel: jax.Array) -> list[jax.Array]:
        """Columns of the output that get a channel of the section."""
        copies = self.output_heads // self.conv_heads
        if copies == 1:
            return [channel]
        first = lax.div(channel, self.head_size) * copies
        within = lax.rem(channel, self.head_size)
        return [(first + copy) * self.head_size + within for copy in range(copies)]


def sections_of(layout: Mamba2Layout) -> tuple[Section, ...]:
    """x, B and C of a layer."""
    conv_heads, conv_groups = layout.conv_heads
    groups = layout.num_groups
    sizes = (
        ("x", layout.head_dim, (layout.x_heads, conv_heads, layout.num_heads)),
        ("B", layout.state_size, (layout.b_groups, conv_groups, groups)),
        ("C", layout.state_size, (groups, groups, groups)),
    )
    parts = zip(sizes, layout.channels, layout.columns[1:4], layout.multipliers[1:4], strict=True)
    return tuple(
        Section(name, channel, column, size, *heads, multiplier, pending=name != "C")
        for (name, size, heads), channel, column, multiplier in parts
    )
