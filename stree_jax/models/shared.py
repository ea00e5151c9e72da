"""Transformer blocks that several layers share, each layer with its own adapters (Zamba2).

x = norm(concat(stream, embedding))
y = mlp(norm(attention(x)))          no residual connections
out_proj(y)                          added to the next layer's input
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.numerics import rms_norm
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.config import ModelConfig
from stree_jax.models.attention import AttentionMixer
from stree_jax.models.cache import AttentionCache, AttentionPending, ConvGatherIndex, Path, Replay
from stree_jax.models.layers import linear
from stree_jax.models.mlp import Mlp
from stree_jax.tree import Tree


class SharedTransformer(nnx.Module):
    """The weights that layers share."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        implementation: str | None = None,
    ):
        assert config.attention is not None
        assert config.mlp is not None
        width = config.attention.input_multiple * config.d_model
        self.norm_scale = nnx.Param(jnp.ones(width, dtype))
        self.attention = AttentionMixer(
            config.attention,
            config.d_model,
            dtype=dtype,
            rngs=rngs,
            implementation=implementation,
        )
        self.mlp_norm_scale = nnx.Param(jnp.ones(config.d_model, dtype))
        self.mlp = Mlp(config.mlp, config.d_model, dtype=dtype, rngs=rngs)


class Adapter(nnx.Module):
    """A product of two narrow matrices."""

    def __init__(self, sizes: tuple[int, int, int], *, dtype: DTypeLike, rngs: nnx.Rngs):
        in_size, rank, out_size = sizes
        self.down = linear(in_size, rank, bias=False, dtype=dtype, rngs=rngs)
        self.up = linear(rank, out_size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, u: Array) -> Array:
        """`[B, T, in_size]` to `[B, T, out_size]`."""
        return self.up(self.down(u))


class SharedLayer(nnx.Module):
    """The weights of a layer that uses a shared block: adapters and output projection."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_scale: float):
        attention, mlp, shared = config.attention, config.mlp, config.shared
        assert attention is not None
        assert mlp is not None
        assert shared is not None
        rank, d_model = shared.adapter_rank, config.d_model
        width = attention.input_multiple * d_model
        self.norm_eps = config.norm_eps
        # Adapters of queries, keys and values; empty if there are none.
        sizes = attention.projected_sizes if shared.attention_adapters else ()
        self.qkv_adapters = nnx.List(
            Adapter((width, rank, size), dtype=dtype, rngs=rngs) for size in sizes
        )
        hidden = 2 * mlp.hidden_size if mlp.gated else mlp.hidden_size
        self.mlp_adapter = Adapter((d_model, rank, hidden), dtype=dtype, rngs=rngs)
        self.out_proj = linear(
            d_model, d_model, bias=False, dtype=dtype, rngs=rngs, scale=out_scale
        )

    def using(self, transformer: SharedTransformer) -> "AdaptedTransformer":
        """This layer as a mixer, with the shared weights."""
        return AdaptedTransformer(self, transformer)


@dataclasses.dataclass(frozen=True)
class AdaptedTransformer:
    """A shared block as one layer uses it; see `Mamba2Mixer` for the methods.

    Its input is the residual stream concatenated with the embedding, `I = 2 M`, not normed.
    """

    layer: SharedLayer
    transformer: SharedTransformer

    def __call__(
        self,
        u: Float[Array, "B T I"],
        cache: AttentionCache,
        valid: Bool[Array, "B T"],
        lengths: Lengths,
    ) -> tuple[Float[Array, "B T M"], AttentionCache]:
        """Runs a right-padded sequence from `cache`."""
        x, adapter = self._before(u)
        y, cache = self.transformer.attention(x, cache, valid, lengths, adapter)
        return self._after(y), cache

    def tree(
        self,
        u: Float[Array, "B Q I"],
        tree: Tree,
        conv_gather_index: ConvGatherIndex,
        cache: AttentionCache,
        prefix_pending: AttentionPending | None = None,
        replay: Replay | None = None,
    ) -> tuple[Float[Array, "B Q M"], AttentionPending, AttentionCache]:
        """Runs the last Q nodes of a tree."""
        x, adapter = self._before(u)
        attention = self.transformer.attention
        y, pending, cache = attention.tree(
            x, tree, conv_gather_index, cache, prefix_pending, replay, adapter
        )
        return self._after(y), pending, cache

    def replay(
        self,
        cache: AttentionCache,
        pending: AttentionPending,
        path: Path,
        conv_gather_index: ConvGatherIndex,
    ) -> AttentionCache:
        """The cache after the path."""
        return self.transformer.attention.replay(cache, pending, path, conv_gather_index)

    def _before(self, u: Array) -> tuple[Array, Array | None]:
        x = rms_norm(u, self.transformer.norm_scale[...], self.layer.norm_eps)
        if not self.layer.qkv_adapters:
            return x, None
        return x, jnp.concatenate([adapter(x) for adapter in self.layer.qkv_adapters], axis=-1)

    def _after(self, y: Array) -> Array:
        y = rms_norm(y, self.transformer.mlp_norm_scale[...], self.layer.norm_eps)
        return self.layer.out_proj(self.transformer.mlp.apply(y, self.layer.mlp_adapter(y)))
