"""Multi-head latent attention (MLA): all heads read one small latent of each token.

    q, c, k_r = in_proj(u);   q_n, q_r = norm_and_project(q);   l = norm(c);   q_r, k_r = rope(...)
    softmax((q_n key_up . l + q_r . k_r) scale) l;   out_proj(gate (that value_up))

The model is DeepSeek-V2's (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1). Its definition expands
keys and values of every head from the latents. Here the projections of the expansion are absorbed:
a head's query moves into the space of the latents, and so does its output out of it. Then it is
grouped-query attention with one key head, which `tree_attention` computes for trees, batches and
sequences alike. The values are the first channels of the keys, so a cache holds one array.

Of a query and a cached token this takes `2 (L + R)` multiply-adds for each head, with latents of
`L` channels and a shared key of `R`. The expansion takes `n + R + v`, and `L (n + v)` for the token
once. In the published sizes it has fewer products from 158 queries of a row on, and half of them
in chunks of 512. But a prompt would then have other bits than a tree, so nothing chooses it.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import (
    AttentionLayout,
    KVCache,
    NodeKV,
    replay_kv,
    rms_norm,
    tree_attention,
    write_kv,
)
from stree_jax.array_types import Array, Bool, Float, Int, Lengths
from stree_jax.checks import require, require_integer
from stree_jax.mesh.partition import Cut
from stree_jax.models.attention import rotary_frequencies
from stree_jax.models.layer import LayerConfig, Nodes, Replay, mixer_cuts, register
from stree_jax.models.layers import MixerModule, New
from stree_jax.models.matrices import Matrix


class LatentCache(NamedTuple):
    """Latents and shared keys of the tokens before the root, as `KVCache` has keys of one head."""

    entries: Float[Array, "B U L E"]  # U is 1
    length: Int[Array, " B"]


@register("latent_attention")
@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig(LayerConfig):
    """A layer with one latent attention mixer.

    Attributes:
        num_heads: heads `W`.
        latent_size: channels of a token's latent.
        head_dim: channels of a head's query that meet the latent.
        value_dim: channels of a head's value.
        rotary_dim: channels of the key that all heads share, and of a query that meet it.
        rope_theta: base of RoPE on these channels, in halves; None: they are not rotated (Kimi).
        query_rank: channels of the normed bottleneck before the queries; None: there is none.
        head_gates: whether each head's output is scaled by the sigmoid of a projection (Ling).
        norm_eps: epsilon of the norms of latents and of the bottleneck.
    """

    num_heads: int
    latent_size: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    rope_theta: float | None = None
    query_rank: int | None = None
    head_gates: bool = False
    norm_eps: float = 1e-6

    has_memory: ClassVar[bool] = True
    equal_to_the_bit: ClassVar[bool] = True
    equal_sizes: ClassVar[tuple[str, ...]] = ("num_heads",)

    def __post_init__(self) -> None:
        for name in ("num_heads", "latent_size", "head_dim", "value_dim", "rotary_dim"):
            require_integer(self, name, 1)
        require_integer(self, "query_rank", 1, optional=True)
        require(self.rotary_dim % 2 == 0, f"rotary_dim must be even, got {self.rotary_dim}")
        require(
            self.rope_theta is None or self.rope_theta > 0,
            f"rope_theta must be above 0, or None for no RoPE, got {self.rope_theta}",
        )
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")

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
        gates = self.num_heads if self.head_gates else 0
        return gates, self.query_rank or self.query_size, self.entry_size

    @property
    def layout(self) -> AttentionLayout:
        """How the shared key is rotated, as one head more than the queries'."""
        theta, size = self.rope_theta, self.rotary_dim
        return AttentionLayout(
            num_heads=self.num_heads + 1,
            num_groups=0,
            head_dim=size,
            scale=(self.head_dim + size) ** -0.5,
            frequencies=() if theta is None else rotary_frequencies(theta, size),
        )

    def build(self, d_model: int, **options: Any) -> "LatentAttentionMixer":
        return LatentAttentionMixer(self, d_model, **options)

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> LatentCache:
        entries = jnp.zeros((batch, 1, max_length, self.entry_size), dtype)
        return LatentCache(entries, jnp.zeros(batch, jnp.int32))

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, num_nodes, 1, self.entry_size), dtype)

    def cuts(self, shards: int) -> dict[str, Cut]:
        """See `LayerConfig`. All shards have the latents, and each has some heads."""
        heads, entry = self.num_heads, (1, self.entry_size)
        query = (heads, self.head_dim + self.rotary_dim)
        gates = ((heads, 1),) if self.head_gates else ()
        table = {name: Cut(0, ((heads, 1),)) for name in ("key_up", "value_up")}
        if self.query_rank is not None:
            table["query_up.kernel"] = Cut(1, (query,))
            query = (1, self.query_rank)
        return table | mixer_cuts((*gates, query, entry), ((heads, self.value_dim),))


class Projected(NamedTuple):
    """What the attention takes at each position."""

    gates: Float[Array, "B T _"]  # of heads; without them none
    query: Float[Array, "B T W E"]  # in the space of entries
    entries: Float[Array, "B T U E"]


class LatentAttentionMixer(MixerModule):
    """One latent attention mixer."""

    config: LatentAttentionConfig

    def make(self, d_model: int, new: New) -> None:
        c = self.config
        self._layout = c.layout

        def of_heads(inputs: int, outputs: int) -> Matrix:
            shape = (c.num_heads, inputs, outputs)
            normal = jax.random.normal(new.rngs.params(), shape, new.dtype)
            return Matrix(inputs**-0.5 * normal)

        self.in_proj = new.linear(d_model, sum(c.column_sizes), False)
        self.latent_norm_scale = nnx.Param(jnp.ones(c.latent_size, new.dtype))
        if c.query_rank is not None:
            self.query_norm_scale = nnx.Param(jnp.ones(c.query_rank, new.dtype))
            self.query_up = new.linear(c.query_rank, c.query_size, False)
        self.key_up = of_heads(c.head_dim, c.latent_size)
        self.value_up = of_heads(c.latent_size, c.value_dim)
        self.out_proj = new.linear(c.num_heads * c.value_dim, d_model, False, new.out_scale)

    def __call__(
        self, u: Float[Array, "B T M"], cache: LatentCache, valid: Array, lengths: Lengths
    ) -> tuple[Float[Array, "B T M"], LatentCache]:
        steps = jnp.arange(u.shape[1], dtype=jnp.int32)[None]
        everywhere = jnp.broadcast_to(steps, valid.shape)
        causal = jnp.broadcast_to(steps <= steps.T, (*valid.shape, valid.shape[1]))
        # As in `AttentionMixer`: a constant would be folded, and a cache read first is copied.
        cache = cache._replace(length=lax.optimization_barrier(cache.length))
        projected = self._project(u, cache.length[:, None] + steps, self.norms_of_sequences())
        nodes = NodeKV(projected.entries, projected.entries)
        written = _entries(write_kv(_as_kv(cache), nodes, valid, everywhere))
        before = written._replace(length=cache.length)
        y = self._attend(projected, projected.entries, before, causal)
        y = self.in_proj.kernel.storage.cleared(y, valid[..., None])
        return self.row_parallel(y), written

    def tree(
        self, u: Float[Array, "B Q M"], at: Nodes
    ) -> tuple[Float[Array, "B Q M"], Float[Array, "B N U E"], LatentCache]:
        tree, _, cache, prefix_pending, replay = at
        if replay is not None:
            cache = self.replay(cache, replay)
        depth, mask = (array[:, -u.shape[1] :] for array in (tree.depth, tree.ancestor_mask))
        projected = self._project(u, cache.length[:, None] + depth, self.implementation)
        entries = projected.entries
        if prefix_pending is not None:
            entries = jnp.concatenate([prefix_pending, entries], axis=1)
        return self.row_parallel(self._attend(projected, entries, cache, mask)), entries, cache

    def replay(self, cache: LatentCache, along: Replay) -> LatentCache:
        nodes = NodeKV(along.pending, along.pending)
        return _entries(replay_kv(_as_kv(cache), nodes, along.path.mask))

    def _project(
        self, u: Float[Array, "B T M"], positions: Int[Array, "B T"], norms: str | None
    ) -> Projected:
        c = self.config

        def norm(x: Array, scale: nnx.Param) -> Array:
            y = rms_norm(x, scale[...], epsilon=c.norm_eps, implementation=norms)
            return y.astype(x.dtype)

        ends = np.cumsum([*c.column_sizes[:2], c.latent_size]).tolist()
        gates, query, latents, key = jnp.split(self.in_proj(u), ends, axis=-1)
        if c.query_rank is not None:
            query = self.query_up(norm(query, self.query_norm_scale))
        query = query.reshape(*u.shape[:2], c.num_heads, -1)
        query, to_rotate = jnp.split(query, [c.head_dim], axis=-1)
        to_rotate = jnp.concatenate([to_rotate, key[:, :, None]], axis=2)
        heads, *_ = self._layout.split(to_rotate.reshape(*u.shape[:2], -1), positions)
        in_space = [self.key_up.by_head(query), heads[:, :, :-1]]
        entries = [norm(latents, self.latent_norm_scale)[:, :, None], heads[:, :, -1:]]
        return Projected(
            gates, jnp.concatenate(in_space, axis=-1), jnp.concatenate(entries, axis=-1)
        )

    def _attend(
        self,
        projected: Projected,
        nodes: Float[Array, "B N U E"],
        cache: LatentCache,
        mask: Bool[Array, "B Q N"],
    ) -> Float[Array, "B Q _"]:
        """The outputs of all heads; NaN of a row whose cache is overfull."""
        c, (entries, length) = self.config, cache
        arrays = projected.query, nodes, nodes, entries, entries, length, mask
        # Sums over the shared key too, which are dropped: a copy of the latents would cost more.
        y = self.run(tree_attention, *arrays, scale=self._layout.scale)[..., : c.latent_size]
        y = self.value_up.by_head(y)
        if c.head_gates:
            gates = jax.nn.sigmoid(projected.gates.astype(jnp.float32))
            y = (y.astype(jnp.float32) * gates[..., None]).astype(y.dtype)
        y = jnp.where((length > entries.shape[2])[:, None, None, None], jnp.nan, y)
        return y.reshape(*y.shape[:2], -1)


def _as_kv(cache: LatentCache) -> KVCache:
    return KVCache(cache.entries, cache.entries, cache.length)


def _entries(cache: KVCache) -> LatentCache:
    return LatentCache(cache.keys, cache.length)
