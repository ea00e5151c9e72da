"""The Mamba-2 mixer of every family: one class; families differ in `Mamba2Config`.

    z, x, B, C, dt = in_proj(u)
    x, B, C = silu(conv(x, B, C));   dt = clip(softplus(dt + dt_bias))
    state = exp(dt A) state + dt x (outer) B;   y = state C + D x
    out_proj(gated_norm(y, z))

The model is Mamba-2's (Dao and Gu 2024, arXiv:2405.21060). The same algebra runs over a sequence
(`__call__`) and over a tree (`tree`), and both read the projection through one `Mamba2Layout`, so
that a clamp or a multiplier cannot differ between prefill and decode.

Over a tree there is one op between the projections, `tree_scan_layer`: convolution, time steps and
pending record, then replay, scan and gate. It is one kernel for few nodes, and two for more. A norm
after the gate is deferred if possible: the scan applies its weight and writes partial sums of the
mean square, and the kernel that adds the output to the residual stream scales the rows. A per-head
norm (MambaInLlama) is done in the scan. Norms of groups of heads (Nemotron-H), norms before the
gate and norms next to other terms of the output projection take a separate launch.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels import (
    Convolution,
    DeferredRMSNorm,
    Gate,
    GatedNorm,
    Mamba2Layout,
    Mamba2Pending,
    replay,
    replay_conv_state,
    ssd,
    tree_conv1d_layer,
    tree_scan_layer,
)
from pallas_kernels.numerics import Product, activate, scaled, total
from pallas_kernels.rms_norm.xla import activated
from stree_jax.array_types import Array, Bool, Float, Float32, Lengths
from stree_jax.checks import is_number, require, require_integer, require_integers
from stree_jax.mesh.partition import Cut
from stree_jax.messages import shown
from stree_jax.models.layer import LayerConfig, Nodes, Replay, Sizes, mixer_cuts, register, share
from stree_jax.models.layers import (
    CONV_WIDTH_BITS,
    LayerInput,
    MixerModule,
    New,
    causal_conv1d,
    conv_state_after,
    sequence_gather_index,
)


class Mamba2Cache(NamedTuple):
    """Cache of a Mamba-2 layer: the tokens before the root."""

    ssm: Float32[Array, "B H P S"]
    conv: Float[Array, "B J C"]  # the last J = K - 1 conv inputs, oldest first


class RecurrentConfig(LayerConfig):
    """A layer with a state for each head, and a convolution before it."""

    conv_width: int
    equal_to_the_bit = norms_input = True
    dtype_of_x: ClassVar[DTypeLike | None] = None  # in pending records; None: that of the others

    @property
    def layout(self) -> Mamba2Layout:
        """Columns of z, x, B, C and dt in the input projection, and how the heads share them."""
        raise NotImplementedError

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> Mamba2Cache:
        """See `LayerConfig`: one size for all lengths."""
        layout = self.layout
        state = (batch, layout.num_heads, layout.head_dim, layout.state_size)
        conv = jnp.zeros((batch, self.conv_width - 1, layout.num_channels), dtype)
        return Mamba2Cache(jnp.zeros(state, jnp.float32), conv)

    def init_pending(self, batch: int, num_nodes: int, dtype: DTypeLike) -> Mamba2Pending:
        def zeros(*shape: int, dtype: DTypeLike = dtype) -> Array:
            return jnp.zeros((batch, num_nodes, *shape), dtype)

        layout = self.layout
        return Mamba2Pending(
            x=zeros(layout.num_heads, layout.head_dim, dtype=self.dtype_of_x or dtype),
            dt=zeros(layout.num_heads, dtype=jnp.float32),
            B=zeros(layout.num_groups, layout.state_size),
            conv_input=zeros(layout.num_channels),
        )


@register("mamba2")
@dataclasses.dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """A layer with one Mamba-2 mixer.

    Attributes:
        num_heads: SSD heads `H`.
        head_dim: channels of a head `P`.
        state_size: SSM state size `S`.
        num_groups: groups `G` of C; also of B unless `num_b_groups` says otherwise.
        num_x_heads: heads of x before repetition (MambaInLlama); None: `num_heads`.
        num_b_groups: groups of B before repetition (MambaInLlama); None: `num_groups`.
        repeat_before_conv: whether x and B are repeated before the convolution or after it.
        conv_width: conv width `K`, at least 2.
        conv_bias, in_proj_bias, out_proj_bias: whether these have a bias.
        mlp_dim: width of the gated branch parallel to the SSM (mamba_ssm with `d_ssm < d_inner`);
            0: none.
        d_per_channel: whether the skip weight D is per channel (mamba_ssm `D_has_hdim`) or per
            head.
        dt_limit: clamp of the time step after softplus, the same in prefill, tree and replay.
        norm: "gate_then_norm", "norm_then_gate" or "none", before the output projection.
        norm_groups: groups of the gated norm; None: `num_groups`.
        norm_eps: epsilon of the gated norm.
        input_multiplier, output_multiplier: scale the mixer's input and output (Falcon-H1).
        section_multipliers: scale z, x, B, C and dt after the input projection (Falcon-H1).
        chunk_size: chunk length of the prefill scan; does not change results.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    num_x_heads: int | None = None
    num_b_groups: int | None = None
    repeat_before_conv: bool = False
    conv_width: int = 4
    conv_bias: bool = True
    in_proj_bias: bool = False
    out_proj_bias: bool = False
    mlp_dim: int = 0
    d_per_channel: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    norm: str = "gate_then_norm"
    norm_groups: int | None = None
    norm_eps: float = 1e-5
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    section_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    chunk_size: int = 64

    def __post_init__(self) -> None:
        require_integer(self, "conv_width", 2, bits=CONV_WIDTH_BITS)
        require_integers(self)
        for name in ("num_groups", "num_x_heads", "num_b_groups"):
            value = getattr(self, name)
            require(
                value is None or self.num_heads % value == 0,
                f"{name} = {value} does not divide num_heads = {self.num_heads}",
            )
        require(
            self.num_groups % self.b_groups == 0,
            f"num_b_groups = {self.num_b_groups} does not divide num_groups = {self.num_groups}",
        )
        require(
            self.inner_size % self.gate_groups == 0,
            f"norm_groups = {self.gate_groups} does not divide"
            f" num_heads * head_dim = {self.inner_size}",
        )
        for name, count in (("dt_limit", 2), ("section_multipliers", 5)):
            values = getattr(self, name)
            require(
                isinstance(values, tuple)
                and len(values) == count
                and all(
                    is_number(value) or (name, value) == ("dt_limit", math.inf) for value in values
                ),
                f"{name} must be {count} numbers, got {shown(values)}",
            )
            object.__setattr__(self, name, tuple(map(float, values)))
        require(
            0 <= self.dt_limit[0] <= self.dt_limit[1] and self.dt_limit[0] < math.inf,
            f"dt_limit must be (low, high) with 0 <= low <= high, got {self.dt_limit}",
        )
        norms = ("gate_then_norm", "norm_then_gate", "none")
        require(self.norm in norms, f"norm must be one of {norms}, got {self.norm!r:.80}")
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")

    @property
    def inner_size(self) -> int:
        """Channels of the scan's output: `H * P`."""
        return self.num_heads * self.head_dim

    @property
    def x_heads(self) -> int:
        """Heads of x in the input projection."""
        return self.num_heads if self.num_x_heads is None else self.num_x_heads

    @property
    def b_groups(self) -> int:
        """Groups of B in the input projection."""
        return self.num_groups if self.num_b_groups is None else self.num_b_groups

    @property
    def gate_groups(self) -> int:
        """Groups of the gated norm."""
        return self.num_groups if self.norm_groups is None else self.norm_groups

    @property
    def layout(self) -> Mamba2Layout:
        return Mamba2Layout(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_groups=self.num_groups,
            state_size=self.state_size,
            x_heads=self.x_heads,
            b_groups=self.b_groups,
            repeat_before_conv=self.repeat_before_conv,
            first_column=2 * self.mlp_dim,
            multipliers=self.section_multipliers,
            dt_limit=self.dt_limit,
        )

    @property
    def norm_spans_shards(self) -> bool:
        """True if the gated norm spans the heads of all shards."""
        return self.norm != "none" and self.gate_groups == 1

    def build(self, d_model: int, **options: Any) -> "Mamba2Mixer":
        return Mamba2Mixer(self, d_model, **options)

    def sizes(self, shards: int) -> Sizes:
        equal = {"mamba2.num_heads": self.num_heads, "mamba2.mlp_dim": self.mlp_dim}
        if self.norm != "none" and self.gate_groups > 1:  # one group spans the shards
            equal["norm groups of mamba2"] = self.gate_groups
        shared = {"mamba2.num_groups": self.num_groups, "mamba2.num_x_heads": self.x_heads}
        return Sizes(equal, shared | {"mamba2.num_b_groups": self.b_groups})

    def local(self, shards: int) -> "Mamba2Config":
        config = dataclasses.replace(
            self,
            num_heads=share(self.num_heads, shards),
            num_groups=share(self.num_groups, shards),
            num_x_heads=share(self.x_heads, shards),
            num_b_groups=share(self.b_groups, shards),
            mlp_dim=share(self.mlp_dim, shards),
            norm_groups=1 if self.norm == "none" else share(self.gate_groups, shards),
        )
        return Mamba2ShardConfig(**vars(config)) if self.norm_spans_shards else config

    def cuts(self, shards: int) -> dict[str, Cut]:
        # As `Mamba2Layout` orders them.
        z = (self.num_heads, self.head_dim)
        x, B = (self.x_heads, self.head_dim), (self.b_groups, self.state_size)
        C, dt = (self.num_groups, self.state_size), (self.num_heads, 1)
        branch = (self.mlp_dim, 1)
        columns = (branch, branch, z, x, B, C, dt)
        channels = (z, C, C) if self.repeat_before_conv else (x, B, C)
        heads = Cut(0, (dt,))
        return mixer_cuts(columns, (branch, z), channels) | {
            "A_log": heads,
            "dt_bias": heads,
            "D": Cut(0, (z,)) if self.d_per_channel else heads,
            "norm_scale": Cut(0, (z,)),
        }


class Mamba2ShardConfig(Mamba2Config):
    """One shard of a layer whose norm spans all shards; `Mamba2Config.local` makes it."""


def convolved(
    mixer: Any,
    projected: Float[Array, "B T _"],
    dt_bias: Float32[Array, " H"],
    conv_state: Float[Array, "B J C"],
    valid: Bool[Array, "B T"],
) -> tuple[Mamba2Pending, Array]:
    """A sequence's record and queries after the convolution of a mixer.

    If sums have one order, the op of trees runs: a token has the same outputs, to the bit.
    """
    layout, (weight, bias) = mixer.config.layout, mixer.conv()
    if mixer.in_proj.kernel.storage.sums_in_one_order:
        index = sequence_gather_index(projected, len(weight))
        arrays = projected, weight, bias, dt_bias, conv_state, index
        pending, queries, _ = mixer.run(tree_conv1d_layer, *arrays, layout=layout)
        return pending, queries
    conv_input = jnp.where(valid[..., None], layout.conv_input(projected), 0)
    x, B, queries = layout.heads(
        activate("silu", causal_conv1d(conv_input, conv_state, weight, bias))
    )
    return Mamba2Pending(x, layout.time_steps(projected, dt_bias), B, conv_input), queries


def convolution_of(
    mixer: Any, projected: Product, dt_bias: Float32[Array, " H"], at: Nodes
) -> Convolution:
    """What a mixer convolves at nodes of a tree."""
    layout, width = mixer.config.layout, mixer.config.conv_width
    previous = at.replay and (at.replay.pending, at.replay.conv_gather_index[width])
    weight, bias = mixer.conv()
    before = at.cache.conv, at.conv_gather_index[width], at.prefix_pending, previous
    return Convolution(projected, weight, bias, dt_bias, *before, layout)


class Mamba2Mixer(MixerModule):
    """One Mamba-2 mixer; `A_log`, `D` and `dt_bias` are float32 whatever the dtype."""

    config: Mamba2Config

    def make(self, d_model: int, new: New) -> None:
        c, layout = self.config, self.config.layout
        self.norm_spans_shards = isinstance(c, Mamba2ShardConfig)
        self.in_proj = new.linear(d_model, layout.num_columns, c.in_proj_bias)
        self.out_proj = new.linear(
            c.mlp_dim + c.inner_size, d_model, c.out_proj_bias, new.out_scale
        )
        convolution = new.conv(c.conv_width, layout.num_channels, c.conv_bias)
        self.conv_weight, self.conv_bias = convolution
        self.A_log, self.dt_bias = new.rates(c.num_heads)
        self.D = nnx.Param(jnp.ones(c.inner_size if c.d_per_channel else c.num_heads, jnp.float32))
        self.norm_scale = nnx.Param(jnp.ones(c.inner_size, new.dtype)) if c.norm != "none" else None

    def __call__(
        self, u: Array, cache: Mamba2Cache, valid: Array, lengths: Lengths
    ) -> tuple[Product | DeferredRMSNorm, Mamba2Cache]:
        c = self.config
        projected = self.in_proj(scaled(u, c.input_multiplier))
        in_one_order = self.in_proj.kernel.storage.sums_in_one_order
        (x, dt, B, conv_input), C = convolved(self, projected, self.dt_bias[...], cache.conv, valid)
        dt = jnp.where(valid[..., None], dt, 0.0)
        gate = self._gate(projected) if in_one_order or self.norm_spans_shards else None
        y, state = self.run(
            ssd,
            x,
            dt,
            self.A_log[...],
            B,
            C,
            self._skip(),
            cache.ssm,
            gate=gate,
            A_is_log=True,
            chunk_size=c.chunk_size,
        )
        conv_state = conv_state_after(cache.conv, conv_input, lengths)
        output = self._finish(y, gate, projected, self.norms_of_sequences())
        return output, Mamba2Cache(state, conv_state)

    def tree(
        self, u: Float[Array, "B Q M"] | LayerInput, at: Nodes
    ) -> tuple[Product | DeferredRMSNorm, Mamba2Pending, Mamba2Cache]:
        c = self.config
        projected = self.in_proj.in_parts(scaled(u, c.input_multiplier))
        gate = self._gate(projected)
        y, pending, *states = self.run(
            tree_scan_layer,
            convolution_of(self, projected, self.dt_bias[...], at),
            self.A_log[...],
            self._skip(),
            *(at.cache.ssm, at.tree.ancestor_mask, at.replay and at.replay.path.mask),
            gate=gate,
        )
        output = self._finish(y, gate, projected, self.implementation)
        return output, pending, Mamba2Cache(*states)

    def replay(self, cache: Mamba2Cache, along: Replay) -> Mamba2Cache:
        x, dt, B, conv_input = along.pending
        arrays = x, dt, self.A_log[...], B, cache.ssm, along.path.mask
        ssm = self.run(replay, *arrays, A_is_log=True)
        window = along.conv_gather_index[self.config.conv_width]
        return Mamba2Cache(ssm, replay_conv_state(conv_input, cache.conv, window))

    def _skip(self) -> Float32[Array, "H P"] | Float32[Array, " H"]:
        """D by channels or by heads."""
        c, D = self.config, self.D[...]
        return D.reshape(c.num_heads, c.head_dim) if c.d_per_channel else D

    def _gate(self, projected: Product) -> Gate | None:
        """The gate for the scan, with the norm after it; None if the scan cannot do the norm."""
        c, norm_weight = self.config, None
        # Of the whole model: a shard may have one group or head where the model has several.
        alone = self.shard.shards == 1
        is_one_group = c.gate_groups == 1 if alone else self.norm_spans_shards
        per_head = c.gate_groups == c.num_heads and not self.norm_spans_shards
        if self.norm_scale is not None:
            commutes = is_one_group and not (c.mlp_dim or c.out_proj_bias)
            if c.norm != "gate_then_norm" or not (commutes or per_head):
                return None
            norm_weight = self.norm_scale[...]
        layout = self.config.layout
        return Gate(
            projected,
            norm_weight,
            start=layout.columns[0],
            multiplier=layout.multipliers[0],
            norm_epsilon=c.norm_eps,
            norm_per_head=per_head,
        )

    def _finish(
        self,
        y: Array | DeferredRMSNorm,
        gate: Gate | None,
        projected: Product,
        kernel: str | None,
    ) -> Product | DeferredRMSNorm:
        """Gate and norm of the scan's output, if the scan has not done them, and projection."""
        if isinstance(y, DeferredRMSNorm):
            return self._project_deferred(y, projected)
        y = y.reshape(*y.shape[:2], -1)
        rows = self._gated_norm(y, projected, kernel) if gate is None else y
        return self._project_out(rows, projected)

    def _gated_norm(self, y: Array, projected: Product, kernel: str | None) -> Array | GatedNorm:
        """Gate and norm of the scan's output `[B, T, H * P]`."""
        c = self.config
        gate, gate_start = self.config.layout.gate(projected)
        if self.norm_spans_shards:
            return self._spanning_norm(y, activated(total(gate), gate_start, y.shape[-1]))
        return GatedNorm(
            y,
            gate,
            None if self.norm_scale is None else self.norm_scale[...],
            norm=c.norm,
            epsilon=c.norm_eps,
            num_groups=1 if self.norm_scale is None else c.gate_groups,
            gate_start=gate_start,
            implementation=kernel,
        )

    def _spanning_norm(self, y: Array, gate: Array) -> Array:
        """Gate and norm over the heads of all shards."""
        assert self.norm_scale is not None
        gate_first = self.config.norm == "gate_then_norm"
        value = y.astype(jnp.float32) * (gate if gate_first else 1.0)
        value = self.spanning_norm(value, self.norm_scale, self.config.norm_eps)
        return (value if gate_first else value * gate).astype(y.dtype)

    def _project_deferred(self, y: DeferredRMSNorm, projected: Product) -> DeferredRMSNorm:
        """The output projection before the rows are scaled."""
        if self.shard.shards == 1:
            return dataclasses.replace(y, value=self._project_out(y.value, projected))
        # One all-reduce sums the products and the squares.
        product = dataclasses.replace(y, value=self.out_proj.wide(y.value))
        y = y.unpacked(self.shard.total(product.packed()), self.shard.shards)
        return dataclasses.replace(y, value=scaled(y.value, self.config.output_multiplier))

    def _project_out(self, y: Array | GatedNorm, projected: Product) -> Product:
        """The output projection, including the gated branch if there is one."""
        c = self.config
        if c.mlp_dim:
            gate, branch, _ = jnp.split(total(projected), (c.mlp_dim, 2 * c.mlp_dim), axis=-1)
            y = jnp.concatenate([activate("silu", gate) * branch, total(y)], axis=-1)
        return self.row_parallel(y, c.output_multiplier)
