"""The attention mixer of every family: one class; families differ in `AttentionConfig`.

    q, k, v = conv(in_proj(u));   q, k = rope(q, k)
    out_proj(softmax(q k scale) v)

The cache has a fixed capacity. A forward pass over a tree does not write the tree to it: nodes
attend to the cached tokens and to their ancestors, at positions that follow from their *depth*.
Replay, which may be the first part of the next forward pass, appends the accepted path's keys and
values.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import (
    NodeKV,
    replay_conv_state,
    replay_kv,
    tree_attention,
    tree_attention_layer,
    tree_conv1d,
    write_kv,
)
from pallas_kernels.numerics import scaled
from stree_jax.array_types import Array, Bool, Float, Lengths
from stree_jax.layer_config import AttentionConfig
from stree_jax.models.cache import AttentionCache, AttentionPending, ConvGatherIndex, Path, Replay
from stree_jax.models.layers import (
    causal_conv1d,
    conv_state_after,
    linear,
    row_parallel,
    silu,
    split_last,
)
from stree_jax.models.layouts import attention_layout
from stree_jax.partition import Shard
from stree_jax.tree import Tree


class Projected(NamedTuple):
    """Outputs of the input projection at each position."""

    qkv: Array  # before the convolution [B, T, (W + 2 U) E]
    branch: Array | None  # output of the gated branch beside the attention [B, T, mlp_dim]


class AttentionMixer(nnx.Module):
    """One attention mixer, with the interface of `Mamba2Mixer`.

    Args:
        config: shape and options of the mixer.
        d_model: width of the output; the input is `input_multiple` times as wide.
        dtype: dtype of the weights.
        rngs: random streams for initialisation.
        out_scale: scales the initial output projection, for deep stacks.
        implementation: kernel implementation, see `pallas_kernels.dispatch`.
    """

    shard: Shard | None = None  # set on a shard, see `models.shard`

    def __init__(
        self,
        config: AttentionConfig,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        out_scale: float = 1.0,
        implementation: str | None = None,
    ):
        c = self.config = config
        self._layout = attention_layout(c)
        self.implementation = implementation
        channels = sum(c.projected_sizes)
        self.in_proj = linear(
            c.input_multiple * d_model,
            channels + 2 * c.mlp_dim,
            bias=c.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.out_proj = linear(
            c.projected_sizes[0] + c.mlp_dim,
            d_model,
            bias=c.out_bias,
            dtype=dtype,
            rngs=rngs,
            scale=out_scale,
        )
        if c.conv_width:
            bound = 1 / math.sqrt(c.conv_width)
            self.conv_weight = nnx.Param(
                jax.random.uniform(
                    rngs.params(), (c.conv_width, channels), dtype, minval=-bound, maxval=bound
                )
            )
            self.conv_bias = nnx.Param(jnp.zeros(channels, dtype))

    def __call__(
        self,
        u: Float[Array, "B T I"],
        cache: AttentionCache,
        valid: Bool[Array, "B T"],
        lengths: Lengths,
        adapter: Array | None = None,
    ) -> tuple[Float[Array, "B T M"], AttentionCache]:
        """Runs a right-padded sequence from `cache`; see `Mamba2Mixer`.

        Args:
            u: inputs, `I = input_multiple * M`.
            cache: the cache of the tokens so far.
            valid: True on real positions, False on padding.
            lengths: number of real positions.
            adapter: term added to q, k and v, `[B, T, (W + 2 U) E]` (Zamba2).
        """
        projected = self._project(u, adapter)
        qkv, conv_state = projected.qkv, cache.conv
        if conv_state is not None:
            conv_input = jnp.where(valid[..., None], qkv, 0)
            qkv = causal_conv1d(conv_input, conv_state, *self._conv())
            conv_state = conv_state_after(conv_state, conv_input, lengths)
        steps, layout = jnp.arange(u.shape[1]), self._layout
        # For an empty cache this is a constant, and XLA would spend seconds folding the masked
        # scores.
        length = lax.optimization_barrier(cache.kv.length)
        query, *nodes = layout.split(qkv, length[:, None] + steps)
        new = NodeKV(*nodes)
        # Written before the attention, which reads up to the old length: else XLA copies the cache.
        kv = write_kv(cache.kv, new, valid, jnp.broadcast_to(steps, valid.shape))
        causal = jnp.broadcast_to(steps <= steps[:, None], (len(u), len(steps), len(steps)))
        y = tree_attention(
            *(query, new.keys, new.values, kv.keys, kv.values, length, causal),
            scale=layout.scale,
            implementation=self.implementation,
        )
        # The cache was overfull before these tokens: some were dropped, so no output is right.
        y = jnp.where((length > kv.keys.shape[2])[:, None, None, None], jnp.nan, y)
        return self._finish(y, projected), AttentionCache(kv, conv_state)

    def tree(
        self,
        u: Float[Array, "B Q I"],
        tree: Tree,
        conv_gather_index: ConvGatherIndex,
        cache: AttentionCache,
        prefix_pending: AttentionPending | None = None,
        replay: Replay | None = None,
        adapter: Array | None = None,
    ) -> tuple[Float[Array, "B Q M"], AttentionPending, AttentionCache]:
        """Runs the last Q nodes of a tree; see `Mamba2Mixer`."""
        c = self.config
        projected = self._project(u, adapter)
        qkv, conv_input, conv_state = projected.qkv, None, cache.conv
        if conv_state is not None:
            conv_input, window = qkv, conv_gather_index[c.conv_width]
            if prefix_pending is not None:
                assert prefix_pending.conv_input is not None
                conv_input = jnp.concatenate([prefix_pending.conv_input, qkv], axis=1)
            if replay is not None:
                conv_state = self._replay_conv(conv_state, replay.pending, replay.conv_gather_index)
            qkv = tree_conv1d(
                conv_input, conv_state, *self._conv(), window, implementation=self.implementation
            )
        num_queries = u.shape[1]
        y, nodes, kv = tree_attention_layer(
            qkv,
            cache.kv,
            tree.depth[:, -num_queries:],
            tree.ancestor_mask[:, -num_queries:],
            layout=self._layout,
            prefix_pending=None if prefix_pending is None else prefix_pending.kv,
            previous=None if replay is None else (replay.pending.kv, replay.path.mask),
            implementation=self.implementation,
        )
        pending = AttentionPending(nodes, conv_input)
        return self._finish(y, projected), pending, AttentionCache(kv, conv_state)

    def replay(
        self,
        cache: AttentionCache,
        pending: AttentionPending,
        path: Path,
        conv_gather_index: ConvGatherIndex,
    ) -> AttentionCache:
        """The cache after the path, whose nodes fill consecutive positions; see `Mamba2Mixer`."""
        conv = cache.conv
        if conv is not None:
            conv = self._replay_conv(conv, pending, conv_gather_index)
        return AttentionCache(replay_kv(cache.kv, pending.kv, path.mask), conv)

    def _replay_conv(
        self, conv: Array, pending: AttentionPending, conv_gather_index: ConvGatherIndex
    ) -> Array:
        assert pending.conv_input is not None
        return replay_conv_state(
            pending.conv_input, conv, conv_gather_index[self.config.conv_width]
        )

    def _project(self, u: Array, adapter: Array | None) -> Projected:
        c = self.config
        projected = self.in_proj(scaled(u, c.input_multiplier))
        qkv, gate, up = split_last(projected, sum(c.projected_sizes), c.mlp_dim)
        if adapter is not None:
            qkv = qkv + adapter
        return Projected(qkv, silu(gate) * up if c.mlp_dim else None)

    def _finish(self, y: Array, projected: Projected) -> Array:
        y = y.reshape(*y.shape[:2], -1)
        if projected.branch is not None:
            y = jnp.concatenate([y, projected.branch], axis=-1)
        return scaled(row_parallel(self.out_proj, y, self.shard), self.config.output_multiplier)

    def _conv(self) -> tuple[Array, Array]:
        return self.conv_weight[...], self.conv_bias[...]
