"""Multi-head latent attention (MLA): all heads read one small latent of each token.

    q, c, k_r = in_proj(u);   q_n, q_r = norm_and_project(q);   l = norm(c);   q_r, k_r = rope(...)
    softmax((q_n key_up . l + q_r . k_r) scale) l;   out_proj(gate (that value_up))

The model is DeepSeek-V2's (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). Its definition expands
keys and values of every head from the latents. Here the projections of the expansion are absorbed:
a head's query moves into the space of the latents, and so does its output out of it. Then it is
grouped-query attention with one key head, which `tree_attention` computes for trees, batches and
sequences alike. The values are the first channels of the keys: the cache and the records of nodes
hold keys, and values of no channels.

Of a query and a cached token this takes `2 (L + R)` multiply-adds for each head, with latents of
`L` channels and a shared key of `R`. The expansion takes `n + R + v`, and `L (n + v)` for the token
once. In the published sizes it has fewer products from 158 queries of a row on, and half of them
in chunks of 512. But a prompt would then have other bits than a tree, so nothing chooses it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import KVCache, NodeKV, rms_norm
from pallas_kernels.numerics import Product, total
from stree_jax.array_types import Array, Float, Int
from stree_jax.checks import require, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.attention import (
    AttentionCache,
    AttentionConfig,
    AttentionMixer,
    AttentionPending,
    Projected,
)
from stree_jax.models.layer import LayerConfig, mixer_cuts, register
from stree_jax.models.layers import New


@register("latent_attention")
@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig(LayerConfig):
    """A layer with one latent attention mixer.

    There is no kernel for it: it runs on XLA or as native code, whatever the model's
    implementation.

    Attributes:
        num_heads: heads `W`.
        latent_size: channels of a token's latent.
        head_dim: channels of a head's query that meet the latent.
        value_dim: channels of a head's value.
        rotary_dim: channels of the key that all heads share, and of a query that meet it.
        rope_theta: base of RoPE on these channels, in halves; None: they are not rotated (Kimi).
        query_rank: channels of the normed bottleneck before the queries; None: there is none.
        output_gate: whether each head's output is scaled by the sigmoid of a projection (Ling).
        norm_eps: epsilon of the norms of latents and of the bottleneck.
    """

    num_heads: int
    latent_size: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    rope_theta: float | None = None
    query_rank: int | None = None
    output_gate: bool = False
    norm_eps: float = 1e-6

    window = qk_norm_eps = None  # as its mixer's base asks
    has_kernel = False
    output_multiplier = 1.0
    equal_to_the_bit = True
    equal_sizes = ("num_heads",)

    def __post_init__(self) -> None:
        require_integers(self)
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")
        self.rotation()  # which refuses channels that cannot be rotated

    @property
    def query_size(self) -> int:
        """Channels of the queries of all heads."""
        return self.num_heads * (self.head_dim + self.rotary_dim)

    @property
    def entry_size(self) -> int:
        """Numbers that the cache holds of a token `E`."""
        return self.latent_size + self.rotary_dim

    @property
    def column_sizes(self) -> tuple[int, int, int]:
        """Columns of the input projection: gates, queries or their bottleneck, and entries."""
        gates = self.num_heads if self.output_gate else 0
        return gates, self.query_rank or self.query_size, self.entry_size

    def rotation(self) -> AttentionConfig:
        """Attention with the channels alone that may be rotated, which says how they are."""
        theta, size = self.rope_theta, self.rotary_dim
        rotated: Any = {} if theta is None else dict(rotary_dim=size, rope_theta=theta)
        scale = (self.head_dim + size) ** -0.5
        return AttentionConfig(self.num_heads, 1, size, scale=scale, **rotated)

    def build(self, d_model: int, **options: Any) -> "LatentAttentionMixer":
        return LatentAttentionMixer(self, d_model, **options)

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> AttentionCache:
        entries = jnp.zeros((batch, 1, max_length, self.entry_size), dtype)
        kv = KVCache(entries, entries[..., :0], jnp.zeros(batch, jnp.int32))
        return AttentionCache(kv, None)

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> AttentionPending:
        entries = jnp.zeros((batch, num_nodes, 1, self.entry_size), dtype)
        return AttentionPending(NodeKV(entries, entries[..., :0]), None)

    def cuts(self, shards: int) -> dict[str, Cut]:
        """See `LayerConfig`. All shards have the latents, and each has some heads."""
        heads, entry = self.num_heads, (1, self.entry_size)
        query = (heads, self.head_dim + self.rotary_dim)
        gates = ((heads, 1),) if self.output_gate else ()
        table = {name: Cut(0, ((heads, 1),)) for name in ("key_up", "value_up")}
        if self.query_rank is not None:
            table["query_up.kernel"] = Cut(1, (query,))
            query = (1, self.query_rank)
        return table | mixer_cuts((*gates, query, entry), ((heads, self.value_dim),))


class LatentAttentionMixer(AttentionMixer):
    """One latent attention mixer."""

    config: LatentAttentionConfig

    def make(self, d_model: int, new: New) -> None:
        c = self.config
        self._layout = c.rotation().layout
        self.in_proj = new.linear(d_model, sum(c.column_sizes), False)
        self.latent_norm_scale = nnx.Param(jnp.ones(c.latent_size, new.dtype))
        if c.query_rank is not None:
            self.query_norm_scale = nnx.Param(jnp.ones(c.query_rank, new.dtype))
            self.query_up = new.linear(c.query_rank, c.query_size, False)
        self.key_up = new.matrix(c.num_heads, c.head_dim, c.latent_size)
        self.value_up = new.matrix(c.num_heads, c.latent_size, c.value_dim)
        self.out_proj = new.linear(c.num_heads * c.value_dim, d_model, False, new.out_scale)

    def _project(self, u: Any, adapter: Array | None) -> Projected:
        gates, columns = jnp.split(self.in_proj(u), [self.config.column_sizes[0]], axis=-1)
        return Projected(gates if self.config.output_gate else None, columns, self._layout)

    def _split(
        self, projected: Projected, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T W E"], NodeKV]:
        """Queries in the space of entries; entries as keys, and as values nothing."""
        c = self.config
        _, queries, _ = c.column_sizes
        query, latents, key = jnp.split(
            total(projected.qkv), [queries, queries + c.latent_size], axis=-1
        )
        if c.query_rank is not None:
            query = self.query_up(self._norm(query, self.query_norm_scale))
        query = query.reshape(*positions.shape, c.num_heads, -1)
        query, to_rotate = jnp.split(query, [c.head_dim], axis=-1)
        to_rotate = jnp.concatenate([to_rotate.reshape(*positions.shape, -1), key], axis=-1)
        rotated, key, _ = self._layout.split(to_rotate, positions)
        query = jnp.concatenate([self.key_up.by_head(query), rotated], axis=-1)
        return query, self._entries(latents, key)

    def entries(self, u: Float[Array, "B T I"], positions: Int[Array, "B T"]) -> NodeKV:
        columns = self._columns(u, sum(self.config.column_sizes[:2]))
        latents, key = jnp.split(columns, [self.config.latent_size], axis=-1)
        _, key, _ = dataclasses.replace(self._layout, num_heads=0).split(key, positions)
        return self._entries(latents, key)

    def _entries(self, latents: Array, key: Array) -> NodeKV:
        """Entries as keys, and as values nothing."""
        latents = self._norm(latents, self.latent_norm_scale)[:, :, None]
        entries = jnp.concatenate([latents, key], axis=-1)
        return NodeKV(entries, entries[..., :0])

    def _norm(self, x: Array, scale: nnx.Param) -> Array:
        epsilon, kernel = self.config.norm_eps, self.norms_of_sequences()
        return rms_norm(x, scale[...], epsilon=epsilon, implementation=kernel).astype(x.dtype)

    def _attend(self, query: Array, nodes: NodeKV, cache: KVCache, *others: Any) -> Array:
        # Sums over the shared key too, which are dropped: a copy of the latents would cost more.
        nodes, cache = nodes._replace(values=nodes.keys), cache._replace(values=cache.keys)
        return super()._attend(query, nodes, cache, *others)[..., : self.config.latent_size]

    def _finish(self, y: Any, *others: Any) -> Product:
        return super()._finish(self.value_up.by_head(y), *others)
