"""`ModelConfig`: everything about a model that is not a weight.

One mixer and one block vocabulary serve every family; a family is a config. Knobs of families that
this version cannot run yet have their place here, and `HybridLM` refuses them by name.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

LAYER_KINDS = ("mamba2", "attention", "mlp", "moe", "parallel")


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """One Mamba-2 mixer.

    Attributes:
        num_heads: SSD heads `H`.
        head_dim: channels of a head `P`.
        state_size: `S`.
        num_groups: groups `G` of C; also of B unless `num_b_groups` says otherwise.
        num_x_heads: heads of x before repetition (MambaInLlama); None: `num_heads`.
        num_b_groups: groups of B before repetition (MambaInLlama); None: `num_groups`.
        repeat_before_conv: repeat x and B before the convolution instead of after it.
        conv_width: `K`, at least 2.
        conv_bias, in_proj_bias, out_proj_bias: which of these have one.
        mlp_dim: width of the gated branch beside the SSM (mamba_ssm with `d_ssm < d_inner`); 0:
            none.
        d_per_channel: the skip weight D is per channel (mamba_ssm `D_has_hdim`), not per head.
        dt_limit: clamp of the time step after softplus, the same in prefill, tree and replay.
        norm: "gate_then_norm", "norm_then_gate" or "none", before the output projection.
        norm_groups: groups of the gated norm; None: `num_groups`.
        norm_eps: of the gated norm.
        input_multiplier: scales the mixer's input (Falcon-H1).
        section_multipliers: scale z, x, B, C and dt after the input projection (Falcon-H1).
        activation: "silu", after the convolution and in the gates.
        chunk_size: of the prefill scan; does not change results.
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
    section_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    activation: str = "silu"
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "chunk_size"):
            _require_integer(self, name, 1)
        for name in ("num_x_heads", "num_b_groups", "norm_groups"):
            _require_integer(self, name, 1, optional=True)
        _require_integer(self, "conv_width", 2)
        _require_integer(self, "mlp_dim", 0)
        for name in ("num_groups", "num_x_heads", "num_b_groups"):
            value = getattr(self, name)
            _require(
                value is None or self.num_heads % value == 0,
                f"{name} = {value} does not divide num_heads = {self.num_heads}",
            )
        _require(
            self.num_groups % self.b_groups == 0,
            f"num_b_groups = {self.num_b_groups} does not divide num_groups = {self.num_groups}",
        )
        _require(
            self.inner_size % self.gate_groups == 0,
            f"norm_groups = {self.gate_groups} does not divide"
            f" num_heads * head_dim = {self.inner_size}",
        )
        _require(
            isinstance(self.dt_limit, tuple)
            and len(self.dt_limit) == 2
            and 0 <= self.dt_limit[0] <= self.dt_limit[1],
            f"dt_limit must be (low, high) with 0 <= low <= high, got {self.dt_limit}",
        )
        norms = ("gate_then_norm", "norm_then_gate", "none")
        _require(self.norm in norms, f"norm must be one of {norms}, got {self.norm!r}")
        _require(self.activation == "silu", f"activation must be 'silu', got {self.activation!r}")
        _require(
            len(self.section_multipliers) == 5,
            f"section_multipliers are five (z, x, B, C, dt), got {self.section_multipliers}",
        )

    @property
    def inner_size(self) -> int:
        """Channels of the scan's output: `H * P`."""
        return self.num_heads * self.head_dim

    @property
    def x_heads(self) -> int:
        """Heads of x as the input projection gives them."""
        return self.num_heads if self.num_x_heads is None else self.num_x_heads

    @property
    def b_groups(self) -> int:
        """Groups of B as the input projection gives them."""
        return self.num_groups if self.num_b_groups is None else self.num_b_groups

    @property
    def gate_groups(self) -> int:
        """Groups of the gated norm."""
        return self.num_groups if self.norm_groups is None else self.norm_groups

    @property
    def projected_sizes(self) -> tuple[int, int, int, int, int]:
        """Widths of z, x, B, C, dt in the input projection's output, in this order."""
        return (
            self.inner_size,
            self.x_heads * self.head_dim,
            self.b_groups * self.state_size,
            self.num_groups * self.state_size,
            self.num_heads,
        )

    @property
    def conv_heads(self) -> tuple[int, int]:
        """Heads of x and groups of B where the convolution sees them."""
        if self.repeat_before_conv:
            return self.num_heads, self.num_groups
        return self.x_heads, self.b_groups

    @property
    def conv_channels(self) -> int:
        """Channels `C` of the convolution: x, B and C together."""
        x_heads, b_groups = self.conv_heads
        return x_heads * self.head_dim + (b_groups + self.num_groups) * self.state_size


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One attention mixer of a hybrid. Described here, run by a later version.

    Attributes:
        num_heads, num_kv_heads, head_dim: grouped-query attention.
        input_multiple: the input is this many times the model width (Zamba2: 2).
        scale: overrides `head_dim ** -0.5`.
        rotary_dim: leading channels of a head that are rotated; 0: no RoPE.
        rope_theta, rope_scaling: RoPE's base and, for Llama 3, its scaling parameters.
        key_multiplier: scales the keys before RoPE (Falcon-H1).
        qkv_bias, out_bias: which projections have one.
        conv_width: depthwise convolution over q, k, v (mamba2attn); 0: none.
        mlp_dim: gated branch inside the mixer (mamba_ssm); 0: none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_multiple: int = 1
    scale: float | None = None
    rotary_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float], ...] | None = None
    key_multiplier: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    conv_width: int = 0
    mlp_dim: int = 0


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """A gated MLP, `out(silu(gate(x)) * up(x))`, as a layer of its own.

    Attributes:
        hidden_size: channels between the projections.
    """

    hidden_size: int

    def __post_init__(self) -> None:
        _require_integer(self, "hidden_size", 1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A whole language model.

    Attributes:
        vocab_size: tokens that exist; ids from here to `padded_vocab_size` are never sampled.
        d_model: width of the residual stream `M`.
        layers: the kind of each layer, bottom up; kinds are `LAYER_KINDS`.
        mamba2: the Mamba-2 mixers; None if no layer has one.
        attention: the attention mixers; None if no layer has one.
        mlp: the gated MLPs; None if no layer is one.
        padded_vocab_size: rows of the embedding; None: `vocab_size`.
        norm_eps: of the norms on the residual stream.
        tie_embeddings: the output head is the transposed embedding.
        residual_float32: keep the residual stream in float32 whatever the weights' type.
        embedding_multiplier, residual_multiplier, logits_multiplier: scale the embedding, each
            layer's output before it is added, and the logits (Granite, Falcon-H1).
        eos_token: the id that ends a text, for whoever decodes; None: unknown.
    """

    vocab_size: int
    d_model: int
    layers: tuple[str, ...]
    mamba2: Mamba2Config | None = None
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    padded_vocab_size: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    residual_float32: bool = True
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    eos_token: int | None = None

    def __post_init__(self) -> None:
        _require_integer(self, "vocab_size", 1)
        _require_integer(self, "d_model", 1)
        _require_integer(self, "padded_vocab_size", 1, optional=True)
        _require_integer(self, "eos_token", 0, optional=True)
        _require(len(self.layers) >= 1, "layers is empty; a model has at least one layer")
        unknown = sorted(set(self.layers) - set(LAYER_KINDS))
        _require(not unknown, f"unknown layer kinds {unknown}; known: {list(LAYER_KINDS)}")
        _require(
            self.num_embeddings >= self.vocab_size,
            f"padded_vocab_size = {self.padded_vocab_size} is below vocab_size = {self.vocab_size}",
        )
        _require(
            self.eos_token is None or 0 <= self.eos_token < self.vocab_size,
            f"eos_token = {self.eos_token} is outside the vocabulary of {self.vocab_size}",
        )
        for kind in ("mamba2", "attention", "mlp"):
            _require(
                getattr(self, kind) is not None or kind not in self.layers,
                f"layers has {kind!r} but the {kind} config is missing",
            )

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding, padding included."""
        return self.vocab_size if self.padded_vocab_size is None else self.padded_vocab_size

    @classmethod
    def mamba2_lm(
        cls,
        vocab_size: int,
        d_model: int,
        num_layers: int,
        *,
        expand: int = 2,
        head_dim: int = 64,
        state_size: int = 128,
        padded_vocab_size: int | None = None,
        tie_embeddings: bool = True,
        eos_token: int | None = None,
        **mixer: Any,
    ) -> "ModelConfig":
        """A pure Mamba-2 language model in the shape of the published ones.

        Args:
            vocab_size, d_model, num_layers: as the names say.
            expand: scan channels as a multiple of `d_model`.
            head_dim, state_size: `P` and `S`.
            padded_vocab_size, tie_embeddings, eos_token: see the class.
            **mixer: further fields of `Mamba2Config`.

        Raises:
            ValueError: `head_dim` does not divide `expand * d_model`.
        """
        for name, value in (("d_model", d_model), ("expand", expand), ("head_dim", head_dim)):
            _require(
                isinstance(value, int) and value >= 1, f"{name} must be at least 1, got {value!r}"
            )
        _require(
            isinstance(num_layers, int) and num_layers >= 1,
            f"num_layers must be at least 1, got {num_layers!r}",
        )
        _require(
            expand * d_model % head_dim == 0,
            f"head_dim = {head_dim} does not divide expand * d_model = {expand * d_model}",
        )
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=("mamba2",) * num_layers,
            mamba2=Mamba2Config(
                num_heads=expand * d_model // head_dim,
                head_dim=head_dim,
                state_size=state_size,
                **mixer,
            ),
            padded_vocab_size=padded_vocab_size,
            tie_embeddings=tie_embeddings,
            eos_token=eos_token,
        )

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """The shape of a published model, by name.

        Raises:
            ValueError: an unknown name.
        """
        _require(name in _PRESETS, f"unknown preset {name!r}; known: {sorted(_PRESETS)}")
        d_model, num_layers = _PRESETS[name]
        return cls.mamba2_lm(50277, d_model, num_layers, padded_vocab_size=50288, chunk_size=256)

    @classmethod
    def tiny(cls, **changes: Any) -> "ModelConfig":
        """A model small enough to compile in a test; `changes` as in `mamba2_lm`."""
        shape: dict[str, Any] = dict(
            vocab_size=37, d_model=16, num_layers=2, head_dim=8, state_size=8, chunk_size=8
        )
        return cls.mamba2_lm(**(shape | changes))

    def to_dict(self) -> dict[str, Any]:
        """The config as plain JSON values; `from_dict` reads it back. Infinity becomes a string."""
        return json.loads(json.dumps(_encode(dataclasses.asdict(self)), allow_nan=False))

    @classmethod
    def from_dict(cls, values: Any) -> "ModelConfig":
        """Reads what `to_dict` wrote.

        Raises:
            ValueError: a field that is unknown or missing, or a value that does not fit.
        """
        _require(
            isinstance(values, Mapping), f"a model config is a table of fields, got {values!r}"
        )
        parts = dict(values)
        for name, part in (
            ("mamba2", Mamba2Config),
            ("attention", AttentionConfig),
            ("mlp", MlpConfig),
        ):
            if parts.get(name) is not None:
                parts[name] = _build(part, parts[name])
        return _build(cls, parts)


# d_model and layers of the published state-spaces/mamba2 models.
_PRESETS = {
    "mamba2-130m": (768, 24),
    "mamba2-370m": (1024, 48),
    "mamba2-780m": (1536, 48),
    "mamba2-1.3b": (2048, 48),
    "mamba2-2.7b": (2560, 64),
}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_integer(config: Any, name: str, least: int, *, optional: bool = False) -> None:
    value = getattr(config, name)
    if value is None and optional:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(
        is_int and value >= least, f"{name} must be an integer of at least {least}, got {value!r}"
    )


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _encode(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    return "inf" if value == math.inf else value


def _decode(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_decode(part) for part in value)
    return math.inf if value == "inf" else value


def _build(cls: type, values: Any) -> Any:
    _require(isinstance(values, Mapping), f"{cls.__name__} needs a table of fields, got {values!r}")
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    _require(not unknown, f"{cls.__name__} has no fields {unknown}; known: {sorted(known)}")
    try:
        return cls(**{name: _decode(value) for name, value in values.items()})
    except TypeError as error:  # a missing field, or a value of the wrong type
        raise ValueError(f"{cls.__name__}: {error}") from None
