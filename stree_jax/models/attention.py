"""The attention mixer of every family: one class, the differences are knobs of `AttentionConfig`.

    q, k, v = conv(in_proj(u));   q, k = rotated by position
    out_proj(softmax(q k scale) v)

The cache has a fixed number of places. A forward over a tree reads it and never writes it: nodes
see the cached tokens and their ancestors, at positions that come from their *depth*. Replay writes
the keys and values of the accepted path, one place after the other.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import replay_conv_state, tree_attention, tree_conv1d
from pallas_kernels.numerics import scaled
from stree_jax.array_types import Array, Bool, Float, Int, Lengths
from stree_jax.layer_config import AttentionConfig
from stree_jax.models.cache import AttentionCache, AttentionPending, Path, Replay, Windows
from stree_jax.models.layers import (
    causal_conv1d,
    conv_state_after,
    linear,
    silu,
    split_last,
)
from stree_jax.tree import Tree


class Projected(NamedTuple):
    """What the input projection gives at each position."""

    qkv: Array  # before the convolution [B, T, (W + 2 U) E]
    branch: Array | None  # output of the gated branch beside the attention [B, T, mlp_dim]


class AttentionMixer(nnx.Module):
    """One attention mixer, with the interface of `Mamba2Mixer`.

    Args:
        config: its shape and knobs.
        d_model: width of the output, and of the input but for `input_multiple`.
        dtype: of the weights.
        rngs: for initialisation.
        out_scale: scales the initial output projection, for deep stacks.
        implementation: of the tree kernels, see `pallas_kernels.dispatch`.
    """

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
        # jax-triton has the ops of Mamba-2 only.
        self.implementation = None if implementation == "jax_triton" else implementation
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
        mask: Bool[Array, "B T"],
        lengths: Lengths,
        adapter: Array | None = None,
    ) -> tuple[Float[Array, "B T M"], AttentionCache]:
        """Runs a right-padded sequence from `cache`; see `Mamba2Mixer`.

        Args:
            u: inputs, `I = input_multiple * M`.
            cache: what came before.
            mask: True on real positions.
            lengths: how many positions are real.
            adapter: is added to q, k, v `[B, T, (W + 2 U) E]` (Zamba2).
        """
        projected = self._project(u, adapter)
        qkv, conv_state = projected.qkv, cache.conv
        if conv_state is not None:
            conv_input = jnp.where(mask[..., None], qkv, 0)
            qkv = causal_conv1d(conv_input, conv_state, *self._conv())
            conv_state = conv_state_after(conv_state, conv_input, lengths)
        steps = jnp.arange(u.shape[1])
        positions = cache.length[:, None] + steps
        query, keys, values = self._split(qkv, positions)
        causal = jnp.broadcast_to(steps <= steps[:, None], (len(u), len(steps), len(steps)))
        # Sequences are trained on, and the kernel has no gradient.
        y = self._attend(query, keys, values, cache, causal, "xla")
        cache = _written(cache, keys, values, positions, mask)
        return self._finish(y, projected), cache._replace(
            length=cache.length + lengths, conv=conv_state
        )

    def tree(
        self,
        u: Float[Array, "B Q I"],
        tree: Tree,
        windows: Windows,
        cache: AttentionCache,
        grown: AttentionPending | None = None,
        replay: Replay | None = None,
        adapter: Array | None = None,
    ) -> tuple[Float[Array, "B Q M"], AttentionPending, AttentionCache]:
        """Runs the last Q nodes of a tree; see `Mamba2Mixer`."""
        if replay is not None:
            cache = self.replay(cache, *replay)
        projected = self._project(u, adapter)
        qkv, conv_input = projected.qkv, None
        if cache.conv is not None:
            conv_input = qkv
            if grown is not None:
                assert grown.conv_input is not None
                conv_input = jnp.concatenate([grown.conv_input, qkv], axis=1)
            window = windows[self.config.conv_width]
            qkv = tree_conv1d(
                conv_input, cache.conv, *self._conv(), window, implementation=self.implementation
            )
        num_queries = u.shape[1]
        positions = cache.length[:, None] + tree.depth[:, -num_queries:]
        query, keys, values = self._split(qkv, positions)
        if grown is not None:
            keys = jnp.concatenate([grown.keys, keys], axis=1)
            values = jnp.concatenate([grown.values, values], axis=1)
        mask = tree.ancestor_mask[:, -num_queries:]
        y = self._attend(query, keys, values, cache, mask, self.implementation)
        return self._finish(y, projected), AttentionPending(keys, values, conv_input), cache

    def replay(
        self, cache: AttentionCache, pending: AttentionPending, path: Path, windows: Windows
    ) -> AttentionCache:
        """The cache after the path, whose nodes fill consecutive places; see `Mamba2Mixer`."""
        # Nodes of a path are in order, parents first: a node's place is how many are before it.
        place = jnp.cumsum(path.mask, axis=1, dtype=jnp.int32) - 1
        new = _written(
            cache, pending.keys, pending.values, cache.length[:, None] + place, path.mask
        )
        conv = cache.conv
        if conv is not None:
            assert pending.conv_input is not None
            conv = replay_conv_state(pending.conv_input, conv, windows[self.config.conv_width])
        length = cache.length + path.mask.sum(axis=1, dtype=jnp.int32)
        return new._replace(length=length, conv=conv)

    def _project(self, u: Array, adapter: Array | None) -> Projected:
        c = self.config
        projected = self.in_proj(scaled(u, c.input_multiplier))
        qkv, gate, up = split_last(projected, sum(c.projected_sizes), c.mlp_dim)
        if adapter is not None:
            qkv = qkv + adapter
        return Projected(qkv, silu(gate) * up if c.mlp_dim else None)

    def _split(self, qkv: Array, positions: Int[Array, "B T"]) -> tuple[Array, Array, Array]:
        """Queries `[B, T, W, E]`, keys and values `[B, T, U, E]`, rotated."""
        c = self.config
        query, keys, values = (
            part.reshape(*part.shape[:-1], -1, c.head_dim)
            for part in split_last(qkv, *c.projected_sizes[:-1])
        )
        keys = scaled(keys, c.key_multiplier)
        if c.rotary_dim:
            angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(c)
            query, keys = rotate(query, angles), rotate(keys, angles)
        return query, keys, values

    def _attend(
        self,
        query: Array,
        keys: Array,
        values: Array,
        cache: AttentionCache,
        mask: Array,
        implementation: str | None,
    ) -> Array:
        y = tree_attention(
            query,
            keys,
            values,
            cache.keys,
            cache.values,
            cache.length,
            mask,
            scale=self.config.score_scale,
            implementation=implementation,
        )
        # More tokens than places: some were dropped, and no output would be right.
        overflown = cache.length > cache.keys.shape[2]
        return jnp.where(overflown[:, None, None, None], jnp.nan, y)

    def _finish(self, y: Array, projected: Projected) -> Array:
        y = y.reshape(*y.shape[:2], -1)
        if projected.branch is not None:
            y = jnp.concatenate([y, projected.branch], axis=-1)
        return scaled(self.out_proj(y), self.config.output_multiplier)

    def _conv(self) -> tuple[Array, Array]:
        return self.conv_weight[...], self.conv_bias[...]


def rotary_frequencies(config: AttentionConfig) -> np.ndarray:
    """Radians a position of each pair of channels `[rotary_dim / 2]`, float32."""
    pairs = np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    frequencies = 1.0 / config.rope_theta**pairs
    if (scaling := config.rope_scaling) is not None:
        # Wavelengths in units of the original context; 1 keeps a frequency, 0 divides it.
        turns = scaling.original_length * frequencies / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies.astype(np.float32)


def rotate(x: Float[Array, "B T W E"], angles: Float[Array, "B T R"]) -> Float[Array, "B T W E"]:
    """Rotary embedding of the first `2 R` channels, which are pairs (i, R + i); in float32."""
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second, rest = split_last(x.astype(jnp.float32), half, half)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _written(
    cache: AttentionCache,
    keys: Float[Array, "B N U E"],
    values: Float[Array, "B N U E"],
    places: Int[Array, "B N"],
    wanted: Bool[Array, "B N"],
) -> AttentionCache:
    """The cache with the `wanted` keys and values at their places; what has no place is dropped."""
    capacity = cache.keys.shape[2]
    if not capacity:  # of a whole sequence, such as in training
        return cache
    rows, places = jnp.arange(len(keys))[:, None], jnp.where(wanted, places, capacity)

    def put(into: Array, new: Array) -> Array:
        return into.at[rows, :, places].set(new.astype(into.dtype), mode="drop")

    return cache._replace(keys=put(cache.keys, keys), values=put(cache.values, values))
