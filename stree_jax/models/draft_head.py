"""The base of heads that draft from a model's hidden states: one attention layer, and norms."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import KVCache, NodeKV, rms_norm
from stree_jax.array_types import Array, Float
from stree_jax.models.attention import AttentionCache, AttentionPending
from stree_jax.models.layer import LayerConfig
from stree_jax.tree import Tree


class DraftHead(nnx.Module):
    """The part of a head with the weights of its `attention`.

    Args:
        config: sizes of the head, with `d_model`, `norm_eps` and `attention`.
        dtype: dtype of weights and activations; activations of a packed head are float32.
    """

    attention: Any

    def __init__(self, config: Any, dtype: DTypeLike):
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def _built(self, layer: LayerConfig, out_scale: float, **options: Any) -> Any:
        own = dict(norm_eps=self.config.norm_eps, dtype=self.dtype, out_scale=out_scale)
        return layer.build(self.config.d_model, **own, **options)

    @property
    def activation_dtype(self) -> Any:
        """Dtype of activations and caches: float32 if the head is packed."""
        return self.attention.in_proj.kernel.result_dtype

    def init_cache(self, batch: int, max_length: int) -> KVCache:
        """The cache before the first entry."""
        return self.config.attention.init_cache(batch, max_length, self.activation_dtype).kv

    def _scale(self) -> nnx.Param:
        return nnx.Param(jnp.ones(self.config.d_model, self.dtype))

    def _norm(self, x: Array, scale: nnx.Param) -> Array:
        own = self.attention.implementation
        return rms_norm(x, scale[...], epsilon=self.config.norm_eps, implementation=own)

    def _attend(
        self, x: Array, tree: Tree, cache: KVCache, prefix: NodeKV | None
    ) -> tuple[Float[Array, "B Q M"], NodeKV]:
        behind = None if prefix is None else AttentionPending(prefix, None)
        y, pending, _ = self.attention.tree(x, tree, {}, AttentionCache(cache, None), behind)
        return y, pending.kv
