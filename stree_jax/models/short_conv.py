"""The gated short convolution of LFM2 and LFM3: a mixer whose only memory is its window.

    b, c, x = in_proj(u);   out_proj(c conv(b x))

The model is Liquid AI's LFM2 (Amini et al. 2025, arXiv:2511.23404). Its cache is the last products
`b x` before the root, its pending record those of the nodes: each node convolves its ancestors'.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import replay_conv_state, short_conv_layer
from pallas_kernels.numerics import Product
from stree_jax.array_types import Array, Float, Lengths
from stree_jax.checks import require_integer, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.layer import LayerConfig, Nodes, Replay, mixer_cuts, register
from stree_jax.models.layers import (
    CONV_WIDTH_BITS,
    LayerInput,
    MixerModule,
    New,
    conv_state_after,
)


@register("short_conv")
@dataclasses.dataclass(frozen=True)
class ShortConvConfig(LayerConfig):
    """A layer with one gated short convolution.

    Attributes:
        num_channels: channels of the convolution `C`.
        conv_width: conv width `K`, at least 2.
        bias: whether the convolution and both projections have a bias.
    """

    num_channels: int
    conv_width: int = 3
    bias: bool = False

    equal_to_the_bit = norms_input = True
    equal_sizes = ("num_channels",)

    def __post_init__(self) -> None:
        require_integer(self, "conv_width", 2, bits=CONV_WIDTH_BITS)
        require_integers(self)

    def build(self, d_model: int, **options: Any) -> "ShortConvMixer":
        return ShortConvMixer(self, d_model, **options)

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, self.conv_width - 1, self.num_channels), dtype)

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, num_nodes, self.num_channels), dtype)

    def cuts(self, shards: int) -> dict[str, Cut]:
        channels = (self.num_channels, 1)
        return mixer_cuts((channels, channels, channels), (channels,), (channels,))


class ShortConvMixer(MixerModule):
    """One gated short convolution."""

    config: ShortConvConfig

    def make(self, d_model: int, new: New) -> None:
        c, channels = self.config, self.config.num_channels
        self.in_proj = new.linear(d_model, 3 * channels, c.bias)
        self.out_proj = new.linear(channels, d_model, c.bias, new.out_scale)
        self.conv_weight, self.conv_bias = new.conv(c.conv_width, channels, c.bias)

    def __call__(
        self, u: Array, cache: Float[Array, "B J C"], valid: Array, lengths: Lengths
    ) -> tuple[Product, Float[Array, "B J C"]]:
        b, c, x = jnp.split(self.in_proj(u), 3, axis=-1)
        inputs = jnp.where(valid[..., None], b * x, 0)
        y = c * self.conv_sequence(inputs, cache)
        return self.row_parallel(y), conv_state_after(cache, inputs, lengths)

    def tree(
        self, u: Float[Array, "B Q M"] | LayerInput, at: Nodes
    ) -> tuple[Product, Float[Array, "B N C"], Float[Array, "B J C"]]:
        _, conv_gather_index, cache, prefix_pending, replay = at
        width = self.config.conv_width
        y, inputs, cache = self.run(
            *(short_conv_layer, self.in_proj.in_parts(u), *self.conv(), cache),
            conv_gather_index[width],
            prefix_pending=prefix_pending,
            previous=replay and (replay.pending, replay.conv_gather_index[width]),
        )
        return self.row_parallel(y), inputs, cache

    def replay(self, cache: Float[Array, "B J C"], along: Replay) -> Float[Array, "B J C"]:
        window = along.conv_gather_index[self.config.conv_width]
        return replay_conv_state(along.pending, cache, window)
