"""Configs of the kinds of layers. One vocabulary serves every family of models."""

import dataclasses
import math
from typing import Any

import numpy as np

from pallas_kernels.numerics import ACTIVATIONS
from stree_jax.checks import require, require_integer, require_types


def _require_activation(config: Any) -> None:
    require(
        config.activation in ACTIVATIONS,
        f"activation must be one of {ACTIVATIONS}, got {config.activation!r:.80}",
    )


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """One Mamba-2 mixer.

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
        activation: "silu", after the convolution and in the gates.
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
    activation: str = "silu"
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "chunk_size"):
            require_integer(self, name, 1)
        for name in ("num_x_heads", "num_b_groups", "norm_groups"):
            require_integer(self, name, 1, optional=True)
        require_integer(self, "conv_width", 2)
        require_integer(self, "mlp_dim", 0)
        require_types(type(self), vars(self))
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
        require(
            0 <= self.dt_limit[0] <= self.dt_limit[1] and self.dt_limit[0] < math.inf,
            f"dt_limit must be (low, high) with 0 <= low <= high, got {self.dt_limit}",
        )
        norms = ("gate_then_norm", "norm_then_gate", "none")
        require(self.norm in norms, f"norm must be one of {norms}, got {self.norm!r:.80}")
        require(
            self.activation == "silu", f"activation must be 'silu', got {self.activation!r:.80}"
        )
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
        require_integer(self, "original_length", 1)
        require_types(type(self), vars(self))
        require(
            self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor,
            "need factor > 0 and 0 < low_freq_factor < high_freq_factor, got"
            f" {self.factor}, {self.low_freq_factor}, {self.high_freq_factor}",
        )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One attention mixer.

    Attributes:
        num_heads: query heads `W`.
        num_kv_heads: key and value heads `U`; query head w uses head `w // (W / U)` of them.
        head_dim: channels of a head `E`.
        input_multiple: the input is this many times the model width (Zamba2: 2).
        scale: multiplies the scores; None: `head_dim ** -0.5`.
        rotary_dim: leading channels of a head that are rotated, in halves as in NeoX; 0: no RoPE.
        rope_theta, rope_scaling: base of RoPE, and Llama 3's scaling or None.
        input_multiplier, key_multiplier, output_multiplier: scale the mixer's input, the keys
            before RoPE, and the mixer's output (Falcon-H1).
        qkv_bias, out_bias: whether these projections have a bias.
        conv_width: width of a depthwise causal convolution with bias over q, k and v (mamba_ssm);
            0: none.
        mlp_dim: width of a gated branch parallel to the attention (mamba_ssm); 0: none.
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
    conv_width: int = 0
    mlp_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "input_multiple"):
            require_integer(self, name, 1)
        for name in ("rotary_dim", "conv_width", "mlp_dim"):
            require_integer(self, name, 0)
        require_types(type(self), vars(self))
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}",
        )
        require(
            self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
            f"rotary_dim must be even and at most head_dim = {self.head_dim},"
            f" got {self.rotary_dim}",
        )
        require(self.rotary_dim <= 1 << 16, f"rotary_dim = {self.rotary_dim} is above 65536")
        require(self.conv_width != 1, "conv_width = 1 is no convolution; use 0")
        require(self.rope_theta > 0, f"rope_theta must be above 0, got {self.rope_theta}")
        require(
            all(map(math.isfinite, self.rotary_frequencies)),
            f"rope_theta = {self.rope_theta} and rope_scaling = {self.rope_scaling} give infinite"
            " frequencies",
        )

    @property
    def projected_sizes(self) -> tuple[int, int, int]:
        """Channels of the queries, the keys and the values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    @property
    def score_scale(self) -> float:
        """Multiplies the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotary_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each rotated pair, `R = rotary_dim / 2` float32 numbers."""
        pairs = np.arange(0, self.rotary_dim, 2) / max(self.rotary_dim, 1)
        frequencies = 1.0 / self.rope_theta**pairs
        if (scaling := self.rope_scaling) is not None:
            # Wavelengths in units of the original context; 1 keeps a frequency, 0 divides it.
            turns = scaling.original_length * frequencies / (2 * np.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        with np.errstate(over="ignore"):
            return tuple(frequencies.astype(np.float32).tolist())


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """An MLP as a separate layer.

    Gated: `out(activation(gate(x)) * up(x))`; otherwise `out(activation(up(x)))`.

    Attributes:
        hidden_size: channels between the projections.
        activation: "silu", "gelu" (the exact one) or "relu2" (the square of relu).
        gated: whether there is a gate, see above.
        bias: whether the projections have a bias.
        gate_multiplier, output_multiplier: scale the gate before its activation, and the output
            (Falcon-H1).
    """

    hidden_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        require_integer(self, "hidden_size", 1)
        require_types(type(self), vars(self))
        _require_activation(self)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts, each an MLP without biases, and optionally one that all tokens use.

    Attributes:
        num_experts: number of experts.
        num_active: experts per token.
        hidden_size: channels of an expert.
        router: "softmax" weighs the chosen experts by the softmax of their scores (Granite);
            "sigmoid" scores experts with a sigmoid, chooses them by score plus a learned
            correction, and weighs them by score (Nemotron-H, DeepSeek-V3).
        num_router_groups, num_active_groups: number of equal groups of experts, and groups per
            token: those whose two best scores have the largest sums ("sigmoid" only).
        normalise: whether a token's weights sum to 1 before `scale` ("sigmoid" only).
        scale: factor of the experts' sum.
        latent_size: width of the latent space of the experts (Nemotron-H); None: none.
        shared_size: channels of the expert that all tokens use; 0: none.
        activation, gated: see `MlpConfig`; the same for all experts.
    """

    num_experts: int
    num_active: int
    hidden_size: int
    router: str = "softmax"
    num_router_groups: int = 1
    num_active_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    latent_size: int | None = None
    shared_size: int = 0
    activation: str = "silu"
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_active", "hidden_size"):
            require_integer(self, name, 1)
        for name in ("num_router_groups", "num_active_groups"):
            require_integer(self, name, 1)
        require_integer(self, "latent_size", 1, optional=True)
        require_integer(self, "shared_size", 0)
        require_types(type(self), vars(self))
        _require_activation(self)
        routers = ("softmax", "sigmoid")
        require(self.router in routers, f"router must be one of {routers}, got {self.router!r:.80}")
        require(
            self.router == "sigmoid" or (self.num_router_groups == 1 and self.scale == 1.0),
            "router groups and a scale belong to router = 'sigmoid'",
        )
        require(
            self.num_experts % self.num_router_groups == 0
            and self.num_active_groups <= self.num_router_groups,
            f"{self.num_active_groups} of num_router_groups = {self.num_router_groups} groups of"
            f" {self.num_experts} experts is not possible",
        )
        group = self.num_experts // self.num_router_groups
        require(
            self.num_active <= self.num_active_groups * group,
            f"num_active = {self.num_active} is more than the {self.num_active_groups * group}"
            " experts that can be chosen",
        )
        require(
            self.num_router_groups == 1 or group >= 2, "a group of experts has at least two of them"
        )

    @property
    def experts_held(self) -> int:
        """Experts whose weights the layer has."""
        return self.num_experts


@dataclasses.dataclass(frozen=True)
class MoeShardConfig(MoeConfig):
    """One shard of a mixture: it has some of the experts, whole, and routes among all of them.

    `stree_jax.partition` builds it.
    """

    experts_held: int = 1


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """Transformer blocks whose weights several layers share (Zamba2).

    The j-th "shared" layer applies block `j % num_blocks` to the residual stream concatenated with
    the embedding, with its own low-rank adapters. Its output is projected and added to the
    *input* of the next layer, not to the residual stream.

    Attributes:
        num_blocks: number of different blocks.
        adapter_rank: rank of the adapters.
        attention_adapters: whether queries, keys and values have adapters too.
    """

    num_blocks: int
    adapter_rank: int
    attention_adapters: bool = False

    def __post_init__(self) -> None:
        require_integer(self, "num_blocks", 1)
        require_integer(self, "adapter_rank", 1)
        require_types(type(self), vars(self))
