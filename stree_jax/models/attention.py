"""The attention mixer of every family: one class; families differ in `AttentionConfig`.

    q, k, v = conv(in_proj(u));   q, k = rope(norm(q), norm(k))
    out_proj(softmax(q k scale) v)

A gate on the outputs (Qwen3.5) comes after the op between the projections: the output projection
may begin with it.

The cache has a fixed capacity. A forward pass over a tree does not write the tree to it: nodes
attend to the cached tokens and to their ancestors, at positions that follow from their *depth*.
Replay, which may be the first part of the next forward pass, appends the accepted path's keys and
values.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import (
    AttentionLayout,
    GatedNorm,
    HeadNorms,
    KVCache,
    NodeKV,
    SoftmaxParts,
    replay_conv_state,
    replay_kv,
    rms_norm,
    tree_attention,
    tree_attention_layer,
    tree_conv1d,
    write_kv,
)
from pallas_kernels.numerics import Product, activate, scaled, total
from stree_jax.array_types import Array, Bool, Float, Int, Lengths
from stree_jax.checks import require, require_integer, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.models.layer import LayerConfig, Nodes, Replay, Sizes, mixer_cuts, register
from stree_jax.models.layers import (
    CONV_WIDTH_BITS,
    LayerInput,
    MixerModule,
    New,
    conv_state_after,
)


class AttentionCache(NamedTuple):
    """Cache of an attention layer: the tokens before the root."""

    kv: KVCache
    conv: Float[Array, "B J C"] | None  # as Mamba-2's; None if there is no convolution


class AttentionPending(NamedTuple):
    """Pending record of an attention layer: it can advance along any path of a tree of N nodes."""

    kv: NodeKV
    conv_input: Float[Array, "B N C"] | None


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's RoPE scaling: low frequencies are slowed down for a longer context.

    Frequencies with wavelengths below `original_length / high_freq_factor` stay, those above
    `original_length / low_freq_factor` are divided by `factor`, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        require_integers(self)
        require(
            self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor,
            "need factor > 0 and 0 < low_freq_factor < high_freq_factor, got"
            f" {self.factor}, {self.low_freq_factor}, {self.high_freq_factor}",
        )


@register("attention")
@dataclasses.dataclass(frozen=True)
class AttentionConfig(LayerConfig):
    """A layer with one attention mixer.

    Attributes:
        num_heads: query heads `W`.
        num_kv_heads: key and value heads `U`; query head w uses head `w // (W / U)` of them.
        head_dim: channels of a head `E`.
        input_multiple: the input is this many times the model width (Zamba2: 2).
        scale: multiplies the scores; None: `head_dim ** -0.5`.
        rotary_dim: leading channels of a head that are rotated, in halves as in NeoX; 0: no RoPE.
        rotary_pairs: so many of the `rotary_dim / 2` pairs turn, the first ones (LFM3's
            "proportional" RoPE); None: all.
        rope_theta, rope_scaling: base of RoPE, and Llama 3's scaling or None.
        input_multiplier, key_multiplier, output_multiplier: scale the mixer's input, the keys
            before RoPE, and the mixer's output (Falcon-H1).
        qkv_bias, out_bias: whether these projections have a bias.
        qk_norm_eps: epsilon of norms of each head's query and key before RoPE; None: no norms.
        qk_norm_spans: whether these norms are over all heads together (Olmo).
        norm_after: see `MlpConfig`.
        output_gate: whether the outputs are scaled by the sigmoid of as many columns of the input
            projection, which are its first (Qwen3.5).
        gate_per_head: whether the gate has one column for each head, not for each channel (LFM3).
        conv_width: width of a depthwise causal convolution with bias over q, k and v (mamba_ssm);
            0: none.
        mlp_dim: width of a gated branch parallel to the attention (mamba_ssm); 0: none.
        window: a token attends to the last `window` tokens, itself included; None: to all. The
            cache keeps as many. There is no kernel for it: such a layer runs on XLA, whatever the
            model's implementation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_multiple: int = 1
    scale: float | None = None
    rotary_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    output_gate: bool = False
    conv_width: int = 0
    mlp_dim: int = 0
    window: int | None = None
    qk_norm_spans: bool = False
    norm_after: bool = False
    rotary_pairs: int | None = None
    gate_per_head: bool = False

    equal_to_the_bit = norms_input = True
    equal_sizes = ("num_heads", "mlp_dim")
    shared_sizes = ("num_kv_heads",)

    def __post_init__(self) -> None:
        require_integers(self)
        require_integer(self, "conv_width", 0, bits=CONV_WIDTH_BITS)
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}",
        )
        require(
            self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
            f"rotary_dim must be even and at most head_dim = {self.head_dim},"
            f" got {self.rotary_dim}",
        )
        require(
            self.rotary_pairs is None or self.rotary_pairs <= self.rotary_dim // 2,
            f"rotary_pairs must be at most rotary_dim / 2 = {self.rotary_dim // 2},"
            f" got {self.rotary_pairs}",
        )
        require(
            self.output_gate or not self.gate_per_head, "gate_per_head = True needs output_gate"
        )
        require(self.rotary_dim <= 1 << 16, f"rotary_dim = {self.rotary_dim} is above 65536")
        require(
            self.qk_norm_eps is None or (self.qk_norm_eps > 0 and not self.conv_width),
            f"qk_norm_eps must be above 0 in a layer without convolution, got {self.qk_norm_eps}",
        )
        require(
            self.qk_norm_eps is not None or not self.qk_norm_spans,
            "qk_norm_spans = True needs qk_norm_eps",
        )
        require(self.conv_width != 1, "conv_width = 1 is no convolution; use 0")
        require(self.rope_theta > 0, f"rope_theta must be above 0, got {self.rope_theta}")
        require(
            all(map(math.isfinite, self.rotary_frequencies)),
            f"rope_theta = {self.rope_theta} and rope_scaling = {self.rope_scaling} give infinite"
            " frequencies",
        )

    @property
    def has_kernel(self) -> bool:
        """Whether `tree_attention_layer` is all between the projections."""
        return self.window is None

    @property
    def projected_sizes(self) -> tuple[int, int, int]:
        """Channels of the queries, the keys and the values."""
        queries, keys, values = (heads * size for heads, size in self.qkv_segments)
        return queries, keys, values

    @property
    def gate_size(self) -> int:
        """Columns of the output gate, before those of the queries."""
        return sum(heads * size for heads, size in self.gate_segments)

    @property
    def gate_segments(self) -> tuple[tuple[int, int], ...]:
        """Segments of the columns of the output gate, see `Cut`."""
        segment = (self.num_heads, 1) if self.gate_per_head else self.qkv_segments[0]
        return (segment,) if self.output_gate else ()

    @property
    def score_scale(self) -> float:
        """Multiplies the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotary_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each rotated pair, `R = rotary_dim / 2` float32 numbers."""
        pairs = np.arange(0, self.rotary_dim, 2) / max(self.rotary_dim, 1)
        frequencies = 1.0 / self.rope_theta**pairs
        if self.rotary_pairs is not None:
            frequencies[self.rotary_pairs :] = 0.0
        if (scaling := self.rope_scaling) is not None:
            # Wavelengths in units of the original context; 1 keeps a frequency, 0 divides it.
            turns = scaling.original_length * frequencies / (2 * np.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        with np.errstate(over="ignore"):
            return tuple(frequencies.astype(np.float32).tolist())

    @property
    def layout(self) -> AttentionLayout:
        """Columns of q, k and v in the input projection, and how queries and keys are rotated."""
        return AttentionLayout(
            num_heads=self.num_heads,
            num_groups=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.score_scale,
            frequencies=self.rotary_frequencies,
            key_multiplier=self.key_multiplier,
            first_column=self.gate_size,
        )

    def check_next(self, below: LayerConfig | None) -> None:
        require(
            self.input_multiple == 1,
            "input_multiple is 2 in a model with 'shared' layers and 1 in others",
        )

    def build(self, d_model: int, **options: Any) -> "AttentionMixer":
        return AttentionMixer(self, d_model, **options)

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> AttentionCache:
        """See `LayerConfig`. With a window, a ring of at most as many tokens."""
        places = max_length if self.window is None else min(max_length, self.window)
        shape = (batch, self.num_kv_heads, places, self.head_dim)
        conv = (batch, self.conv_width - 1, sum(self.projected_sizes))
        lengths = jnp.zeros(batch, jnp.int32)
        return AttentionCache(
            kv=KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), lengths),
            conv=jnp.zeros(conv, dtype) if self.conv_width else None,
        )

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> AttentionPending:
        def zeros(*shape: int) -> Array:
            return jnp.zeros((batch, num_nodes, *shape), dtype)

        shape = (self.num_kv_heads, self.head_dim)
        return AttentionPending(
            kv=NodeKV(zeros(*shape), zeros(*shape)),
            conv_input=zeros(sum(self.projected_sizes)) if self.conv_width else None,
        )

    def sizes(self, shards: int) -> Sizes:
        """See `LayerConfig`. A norm over heads that several shards hold would count them again."""
        equal, of_keys = super().sizes(shards)
        return Sizes(equal | of_keys, {}) if self.qk_norm_spans else Sizes(equal, of_keys)

    def cuts(self, shards: int) -> dict[str, Cut]:
        qkv, branch = self.qkv_segments, (self.mlp_dim, 1)
        columns = (*self.gate_segments, *qkv, branch, branch)
        norms = {"q_norm_scale": qkv[0], "k_norm_scale": qkv[1]} if self.qk_norm_spans else {}
        norm_cuts = {name: Cut(0, (heads,)) for name, heads in norms.items()}
        return norm_cuts | mixer_cuts(columns, (qkv[0], branch), qkv)

    @property
    def qkv_segments(self) -> tuple[tuple[int, int], ...]:
        """Segments of the columns of q, k and v, see `Cut`."""
        keys = (self.num_kv_heads, self.head_dim)
        return (self.num_heads, self.head_dim), keys, keys


class Projected(NamedTuple):
    """Outputs of the input projection at each position."""

    gate: Product | None  # of heads [B, T, W], or in the first W E columns one of each channel
    qkv: Product  # before the convolution, columns of the layout [B, T, X]
    layout: AttentionLayout
    branch: Array | None = None  # output of the gated branch beside the attention [B, T, mlp_dim]


class AttentionMixer(MixerModule):
    """One attention mixer."""

    config: Any  # an `AttentionConfig`, or what a subclass has

    def make(self, d_model: int, new: New) -> None:
        c = self.config
        self._layout = c.layout
        channels = sum(c.projected_sizes)
        columns = c.gate_size + channels + 2 * c.mlp_dim
        self.in_proj = new.linear(c.input_multiple * d_model, columns, c.qkv_bias)
        rows = c.projected_sizes[0] + c.mlp_dim
        self.out_proj = new.linear(rows, d_model, c.out_bias, new.out_scale)
        if c.qk_norm_eps is not None:  # scales of `1 + w` do not fit into bfloat16
            of_query, of_keys, _ = c.projected_sizes if c.qk_norm_spans else [c.head_dim] * 3
            self.q_norm_scale = nnx.Param(jnp.ones(of_query, jnp.float32))
            self.k_norm_scale = nnx.Param(jnp.ones(of_keys, jnp.float32))
        if c.conv_width:
            self.conv_weight, self.conv_bias = new.conv(c.conv_width, channels, True)

    def __call__(
        self,
        u: Float[Array, "B T I"],
        cache: AttentionCache,
        valid: Bool[Array, "B T"],
        lengths: Lengths,
        adapter: Array | None = None,
    ) -> tuple[Product, AttentionCache]:
        projected, conv_state = self._project(u, adapter), cache.conv
        if conv_state is not None:
            conv_input = jnp.where(valid[..., None], total(projected.qkv), 0)
            projected = projected._replace(qkv=self.conv_sequence(conv_input, conv_state))
            conv_state = conv_state_after(conv_state, conv_input, lengths)
        steps = jnp.arange(u.shape[1], dtype=jnp.int32)[None]
        everywhere = jnp.broadcast_to(steps, valid.shape)
        causal = jnp.broadcast_to(steps <= steps.T, (*valid.shape, valid.shape[1]))
        # For an empty cache this is a constant, and XLA would spend seconds folding the masked
        # scores.
        before = cache.kv._replace(length=lax.optimization_barrier(cache.kv.length))
        query, new = self._split(projected, before.length[:, None] + steps)
        ring = self.config.window is not None
        kv = write_kv(before, new, valid, everywhere, ring=ring)
        if not ring:
            # Read after it is written, up to the old length: else XLA copies the cache.
            before = kv._replace(length=before.length)
        y = self._attend(query, new, before, causal)
        y = self.in_proj.kernel.storage.cleared(y, valid[..., None, None])
        output = self._finish(y, projected, self.norms_of_sequences())
        return output, AttentionCache(kv, conv_state)

    def tree(
        self,
        u: Float[Array, "B Q I"] | LayerInput,
        at: Nodes,
        adapter: Array | None = None,
        *,
        is_block: bool = False,
    ) -> tuple[Product, AttentionPending, AttentionCache]:
        tree, conv_gather_index, cache, prefix_pending, replay = at
        c = self.config
        projected, conv_input, conv_state = self._project(u, adapter), None, cache.conv
        if conv_state is not None:
            conv_input, window = total(projected.qkv), conv_gather_index[c.conv_width]
            if prefix_pending is not None:
                assert prefix_pending.conv_input is not None
                conv_input = jnp.concatenate([prefix_pending.conv_input, conv_input], axis=1)
            if replay is not None:
                conv_state = self._replay_conv(conv_state, replay)
            convolved = self.run(tree_conv1d, conv_input, conv_state, *self.conv(), window)
            projected = projected._replace(qkv=convolved)
        num_queries = projected.qkv.shape[1]
        depth, mask = (array[:, -num_queries:] for array in (tree.depth, tree.ancestor_mask))
        prefix = None if prefix_pending is None else prefix_pending.kv
        previous = None if replay is None else (replay.pending.kv, replay.path.mask)
        if c.has_kernel:
            y, nodes, kv = self.run(
                *(tree_attention_layer, projected.qkv, cache.kv, depth, mask),
                layout=projected.layout,
                norms=self._norms,
                prefix_pending=prefix,
                previous=previous,
                in_parts=True,
            )
        else:
            ring = c.window is not None
            kv = cache.kv if previous is None else replay_kv(cache.kv, *previous, ring=ring)
            query, nodes = self._split(projected, kv.length[:, None] + depth)
            if prefix is not None:
                both = zip(prefix, nodes, strict=True)
                nodes = NodeKV(*(jnp.concatenate(pair, axis=1) for pair in both))
            y = self._attend(query, nodes, kv, mask, is_block)
        pending = AttentionPending(nodes, conv_input)
        output = self._finish(y, projected, self.implementation)
        return output, pending, AttentionCache(kv, conv_state)

    def replay(self, cache: AttentionCache, along: Replay) -> AttentionCache:
        ring = self.config.window is not None
        kv = replay_kv(cache.kv, along.pending.kv, along.path.mask, ring=ring)
        return AttentionCache(kv, self._replay_conv(cache.conv, along))

    @property
    def _norms(self) -> HeadNorms | None:
        """Norms of each head."""
        c = self.config
        if c.qk_norm_eps is None or c.qk_norm_spans:
            return None
        return HeadNorms(self.q_norm_scale[...], self.k_norm_scale[...], c.qk_norm_eps)

    def _split(
        self, projected: Projected, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T W E"], NodeKV]:
        """Queries, keys and values at these positions."""
        kernel, qkv = self.norms_of_sequences(), total(projected.qkv)
        query, *nodes = projected.layout.split(qkv, positions, self._norms, kernel)
        return query, NodeKV(*nodes)

    def _attend(
        self,
        query: Float[Array, "B Q W E"],
        nodes: NodeKV,
        cache: KVCache,
        mask: Bool[Array, "B Q N"],
        is_block: bool = False,
    ) -> Float[Array, "B Q W E"]:
        """The outputs; NaN of a row whose cache has dropped tokens that it should see."""
        window, capacity = self.config.window, cache.keys.shape[2]
        is_known = self.config.has_kernel or self.implementation in (None, "xla", "native")
        y = tree_attention(
            *(query, *nodes, *cache, mask),
            scale=self._layout.scale,
            window=window,
            is_block=is_block,
            implementation=self.implementation if is_known and not is_block else "xla",
        )
        if window is None or capacity < window:
            y = jnp.where((cache.length > capacity)[:, None, None, None], jnp.nan, y)
        return y

    def _replay_conv(self, conv: Array | None, along: Replay) -> Array | None:
        if conv is None:
            return None
        window = along.conv_gather_index[self.config.conv_width]
        return replay_conv_state(along.pending.conv_input, conv, window)

    def _project(self, u: Array | LayerInput, adapter: Array | None) -> Projected:
        c, layout = self.config, self._layout
        product = self.in_proj.in_parts(scaled(u, c.input_multiplier))
        gate = product if c.output_gate else None
        is_changed = adapter is not None or c.conv_width or c.qk_norm_spans
        if not (is_changed or c.mlp_dim or c.gate_per_head):
            return Projected(gate, product, layout)
        ends = np.cumsum([c.gate_size, layout.num_columns, c.mlp_dim]).tolist()
        gate, qkv, branch_gate, up = jnp.split(total(product), ends, axis=-1)
        if adapter is not None:
            qkv = qkv + adapter
        branch = activate("silu", branch_gate) * up if c.mlp_dim else None
        layout = dataclasses.replace(layout, first_column=0)
        return Projected(
            gate if c.output_gate else None, self._spanned(qkv, c.num_heads), layout, branch
        )

    def entries(self, u: Float[Array, "B T I"], positions: Int[Array, "B T"]) -> NodeKV:
        """Keys and values alone, for heads whose layers have no branch and no convolution."""
        columns = self._columns(u, self.config.gate_size + self.config.projected_sizes[0])
        layout = dataclasses.replace(self._layout, num_heads=0, first_column=0)
        keys = Projected(None, self._spanned(columns, 0), layout)
        return self._split(keys, positions)[1]

    def _columns(self, u: Array, first: int) -> Array:
        """Columns of the input projection from `first` on."""
        projection, kernel = self.in_proj, self.in_proj.kernel.storage
        # A kernel would have them copied first.
        projected = total(kernel.cut(first).product(u, True, "xla")).astype(kernel.dtype)
        if projection.bias is not None:
            projected += projection.bias[first:]
        return projected

    def _spanned(self, qkv: Float[Array, "B T _"], num_heads: int) -> Float[Array, "B T _"]:
        """Queries of so many heads, keys and values, with norms over all heads if it has such."""
        c = self.config
        if not c.qk_norm_spans:
            return qkv
        first, end = num_heads * c.head_dim, (num_heads + c.num_kv_heads) * c.head_dim
        query, keys, values = jnp.split(qkv, (first, end), axis=-1)

        def norm(x: Array, scale: nnx.Param) -> Array:
            if self.shard.shards > 1:
                return self.spanning_norm(x, scale, c.qk_norm_eps).astype(x.dtype)
            kernel = self.norms_of_sequences()
            normed = rms_norm(x, scale[...], epsilon=c.qk_norm_eps, implementation=kernel)
            return normed.astype(x.dtype)

        normed = query if num_heads == 0 else norm(query, self.q_norm_scale)
        return jnp.concatenate([normed, norm(keys, self.k_norm_scale), values], axis=-1)

    def _finish(
        self, y: Array | SoftmaxParts, projected: Projected, implementation: str | None
    ) -> Product:
        """Gate and output projection; the implementation is that of gates of channels."""
        gate, heads = projected.gate, self.config.num_heads
        if gate is not None and gate.shape[-1] == heads:
            y = total(y).reshape(*y.shape[:2], heads, -1)
            of_heads = jax.nn.sigmoid(total(gate).astype(jnp.float32))[..., None]
            y, gate = (y.astype(jnp.float32) * of_heads).astype(y.dtype), None
        if not isinstance(y, SoftmaxParts):
            y = y.reshape(*y.shape[:2], -1)
        options: Any = dict(activation="sigmoid", implementation=implementation)
        rows: Array | GatedNorm = GatedNorm(y, gate, None, norm="none", **options)
        if projected.branch is not None:
            rows = jnp.concatenate([total(rows), projected.branch], axis=-1)
        return self.row_parallel(rows, self.config.output_multiplier)
