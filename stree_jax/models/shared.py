"""Transformer blocks that several layers share, each layer with its own adapters (Zamba2).

x = norm(concat(stream, embedding))
y = mlp(norm(attention(x)))          no residual connections
out_proj(y)                          added to the next layer's input
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import rms_norm
from pallas_kernels.numerics import Product, total
from stree_jax.array_types import Array, Float, Lengths
from stree_jax.checks import require, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.attention import (
    AttentionCache,
    AttentionConfig,
    AttentionPending,
)
from stree_jax.models.layer import LayerConfig, Nodes, Replay, register
from stree_jax.models.layers import Made, New
from stree_jax.models.mamba2 import Mamba2Config
from stree_jax.models.mlp import MlpConfig


@register("shared")
@dataclasses.dataclass(frozen=True)
class SharedConfig(LayerConfig):
    """Transformer blocks whose weights several layers share (Zamba2).

    The j-th "shared" layer applies block `j % num_blocks` to the residual stream concatenated with
    the embedding, with its own low-rank adapters. Its output is projected and added to the
    *input* of the next layer, not to the residual stream.

    Attributes:
        num_blocks: number of different blocks.
        adapter_rank: rank of the adapters.
        attention_adapters: whether queries, keys and values have adapters too.
        attention, mlp: configs of the blocks; `ModelConfig` fills in its own where they are None.
    """

    num_blocks: int
    adapter_rank: int
    attention_adapters: bool = False
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None

    equal_to_the_bit = True
    is_shared = True

    def __post_init__(self) -> None:
        require_integers(self)

    @property
    def blocks(self) -> tuple[AttentionConfig, MlpConfig]:
        """The configs of the blocks, which a layer of a model has."""
        assert self.attention is not None
        assert self.mlp is not None
        return self.attention, self.mlp

    def check_next(self, below: LayerConfig | None) -> None:
        require(
            isinstance(below, Mamba2Config),
            "a 'shared' layer gives its output to a 'mamba2' layer, which must come next",
        )
        require(
            self.blocks[0].input_multiple == 2,
            "input_multiple is 2 in a model with 'shared' layers and 1 in others",
        )

    def build(self, d_model: int, **options: Any) -> "SharedLayer":
        return SharedLayer(self, d_model, **options)

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> AttentionCache:
        return self.blocks[0].init_cache(batch, max_length, dtype)

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> AttentionPending:
        return self.blocks[0].init_pending(batch, num_nodes, dtype)

    def cuts(self, shards: int) -> dict[str, Cut]:
        """See `LayerConfig`. Adapters are cut at their outputs."""
        attention, mlp = self.blocks
        table = {
            f"qkv_adapters.{i}.up.kernel": Cut(1, (segment,))
            for i, segment in enumerate(attention.qkv_segments)
        }
        segments = mlp.cuts(shards)["in_proj.kernel"].segments
        return table | {"mlp_adapter.up.kernel": Cut(1, segments)}


class SharedTransformer(Made):
    """The weights that layers share."""

    def make(self, d_model: int, new: New) -> None:
        attention, mlp = self.config.blocks
        self.norm_scale = nnx.Param(jnp.ones(attention.input_multiple * d_model, new.dtype))
        self.attention = new.layer(attention, d_model)
        self.mlp_norm_scale = nnx.Param(jnp.ones(d_model, new.dtype))
        self.mlp = new.layer(mlp, d_model)


class Adapter(nnx.Module):
    """A product of two narrow matrices."""

    def __init__(self, in_size: int, rank: int, out_size: int, new: New):
        self.down = new.linear(in_size, rank, False)
        self.up = new.linear(rank, out_size, False)

    def __call__(self, u: Array) -> Array:
        """`[B, T, in_size]` to `[B, T, out_size]`."""
        return self.up(self.down(u))


class SharedLayer(Made):
    """The weights of a layer that uses a shared block: adapters and output projection."""

    def make(self, d_model: int, new: New) -> None:
        attention, mlp = self.config.blocks
        rank, width = self.config.adapter_rank, attention.input_multiple * d_model
        # Adapters of queries, keys and values; empty if there are none.
        sizes = attention.projected_sizes if self.config.attention_adapters else ()
        self.qkv_adapters = nnx.List(Adapter(width, rank, size, new) for size in sizes)
        hidden = 2 * mlp.hidden_size if mlp.gated else mlp.hidden_size
        self.mlp_adapter = Adapter(d_model, rank, hidden, new)
        self.out_proj = new.linear(d_model, d_model, False, new.out_scale)


@dataclasses.dataclass(frozen=True)
class AdaptedTransformer:
    """A shared block as one layer uses it, on stream and embedding `I = 2 M`, not normed."""

    layer: SharedLayer
    transformer: SharedTransformer

    def __call__(
        self, u: Array, cache: AttentionCache, valid: Array, lengths: Lengths
    ) -> tuple[Array, AttentionCache]:
        x, adapter = self._before(u)
        y, cache = self.transformer.attention(x, cache, valid, lengths, adapter)
        return self._after(y), cache

    def tree(
        self, u: Float[Array, "B Q I"], at: Nodes
    ) -> tuple[Float[Array, "B Q M"], AttentionPending, AttentionCache]:
        x, adapter = self._before(u)
        y, pending, cache = self.transformer.attention.tree(x, at, adapter)
        return self._after(y), pending, cache

    def replay(self, cache: AttentionCache, along: Replay) -> AttentionCache:
        return self.transformer.attention.replay(cache, along)

    def _before(self, u: Array) -> tuple[Array, Array | None]:
        x = self._norm(u, self.transformer.norm_scale)
        if not self.layer.qkv_adapters:
            return x, None
        return x, jnp.concatenate([adapter(x) for adapter in self.layer.qkv_adapters], axis=-1)

    def _after(self, y: Product) -> Array:
        y = self._norm(y, self.transformer.mlp_norm_scale)
        y = self.transformer.mlp.apply(y, self.layer.mlp_adapter(y))
        return self.layer.out_proj(total(y))

    def _norm(self, x: Product, scale: nnx.Param) -> Array:
        implementation = self.transformer.attention.implementation
        epsilon = self.layer.norm_eps
        return rms_norm(total(x), scale[...], epsilon=epsilon, implementation=implementation)
