"""`ModelConfig`: the architecture and sizes of a model.

All model families share the same layers. A family is a config, not a class.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stree_jax.checks import check_int, require, require_integer, require_types
from stree_jax.layer_config import (
    AttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
)
from stree_jax.messages import shown
from stree_jax.presets import PRESETS

# Each kind of layer and the configs that it needs.
LAYER_PARTS = {
    "mamba2": ("mamba2",),
    "attention": ("attention",),
    "parallel": ("mamba2", "attention"),  # same input, outputs added (Falcon-H1)
    "mlp": ("mlp",),
    "moe": ("moe",),
    "shared": ("shared", "attention", "mlp"),  # a transformer block used by several layers (Zamba2)
}
LAYER_KINDS = tuple(LAYER_PARTS)
_MAX_LAYERS = 8192  # a damaged or hostile file may claim any number

_CONFIGS = {
    "mamba2": Mamba2Config,
    "attention": AttentionConfig,
    "mlp": MlpConfig,
    "moe": MoeConfig,
    "shared": SharedConfig,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A whole language model.

    Attributes:
        vocab_size: size of the vocabulary; ids from here to `padded_vocab_size` are never sampled.
        d_model: width of the residual stream `M`.
        layers: the kind of each layer, first to last, from `LAYER_KINDS`.
        mamba2: config of the Mamba-2 mixers; None if no layer has one.
        attention: config of the attention mixers; None if no layer has one.
        mlp: config of the MLPs; None if no layer has one.
        moe: config of the mixtures of experts; None if no layer has one.
        shared: config of the transformer blocks of the "shared" layers, built from `attention` and
            `mlp`; None if there are none.
        padded_vocab_size: rows of the embedding; None means `vocab_size`.
        norm_eps: epsilon of the norms on the residual stream.
        tie_embeddings: the output head is the transposed embedding.
        residual_float32: keep the residual stream in float32, whatever the dtype of the weights.
        embedding_multiplier, residual_multiplier, logits_multiplier: scale the embedding, each
            layer's output before the residual add, and the logits (Granite, Falcon-H1).
        eos_token: end-of-sequence id, or a tuple of several; None if unknown.
        max_length: context length in tokens. `generate` refuses longer requests unless told
            otherwise. None means no limit.
    """

    vocab_size: int
    d_model: int
    layers: tuple[str, ...]
    mamba2: Mamba2Config | None = None
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    moe: MoeConfig | None = None
    shared: SharedConfig | None = None
    padded_vocab_size: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    residual_float32: bool = True
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    eos_token: int | tuple[int, ...] | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        require_integer(self, "vocab_size", 1)
        require_integer(self, "d_model", 1)
        require_integer(self, "padded_vocab_size", 1, optional=True)
        require_integer(self, "max_length", 1, optional=True)
        require_types(type(self), vars(self))
        require(len(self.layers) >= 1, "layers is empty; a model has at least one layer")
        require(
            len(self.layers) <= _MAX_LAYERS,
            f"layers has {len(self.layers)} entries; at most {_MAX_LAYERS} are possible",
        )
        unknown = sorted(set(self.layers) - set(LAYER_KINDS))
        require(not unknown, f"unknown layer kinds {unknown!s:.80}; known: {list(LAYER_KINDS)}")
        require(self.norm_eps > 0, f"norm_eps must be above 0, got {self.norm_eps}")
        require(
            self.num_embeddings >= self.vocab_size,
            f"padded_vocab_size = {self.padded_vocab_size} is below vocab_size = {self.vocab_size}",
        )
        tokens = self.eos_token if isinstance(self.eos_token, tuple) else (self.eos_token,)
        require(
            self.eos_token is None or all(type(t) is int for t in tokens),
            f"eos_token must be an integer or several, got {self.eos_token!r:.80}",
        )
        require(
            self.eos_token is None or all(0 <= t < self.vocab_size for t in tokens),  # type: ignore[operator]
            f"eos_token = {self.eos_token!s:.80} is outside the vocabulary of {self.vocab_size}",
        )
        for kind, parts in LAYER_PARTS.items():
            for part in parts:
                require(
                    getattr(self, part) is not None or kind not in self.layers,
                    f"layers has {kind!r} but the {part} config is missing",
                )
        require(
            self.attention is None
            or self.attention.input_multiple == (2 if "shared" in self.layers else 1),
            "input_multiple is 2 in a model with 'shared' layers and 1 in others",
        )
        for kind, below in zip(self.layers, (*self.layers[1:], None), strict=True):
            require(
                kind != "shared" or below == "mamba2",
                "a 'shared' layer gives its output to a 'mamba2' layer, which must come next",
            )
        require(
            "shared" not in self.layers or "attention" not in self.layers,
            "'shared' and 'attention' layers in one model are not supported",
        )

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding, including padding."""
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
        eos_token: int | tuple[int, ...] | None = None,
        attention_layers: Sequence[int] = (),
        attention: Mapping[str, Any] | None = None,
        mlp: Mapping[str, Any] | None = None,
        residual_float32: bool = True,
        **mixer: Any,
    ) -> "ModelConfig":
        """A Mamba-2 language model with the layout of the published ones.

        With `attention_layers`, `mlp` and `residual_float32=False` it is a hybrid in Bamba's
        layout.

        Args:
            vocab_size, d_model: fields of `ModelConfig`.
            num_layers: number of layers.
            expand: inner width of the mixer as a multiple of `d_model`.
            head_dim, state_size: `P` and `S`.
            padded_vocab_size, tie_embeddings, eos_token, residual_float32: fields of
                `ModelConfig`.
            attention_layers: indices of layers with attention instead of Mamba-2.
            attention: fields of `AttentionConfig` for these layers.
            mlp: fields of `MlpConfig` for an MLP after each of the `num_layers`; None: no MLPs.
            **mixer: more fields of `Mamba2Config`.

        Raises:
            ValueError: `head_dim` does not divide `expand * d_model`, or `attention_layers` has an
                index out of range.
        """
        check_int("d_model", d_model, 1)
        check_int("num_layers", num_layers, 1)
        check_int("expand", expand, 1)
        check_int("head_dim", head_dim, 1)
        require(
            expand * d_model % head_dim == 0,
            f"head_dim = {head_dim} does not divide expand * d_model = {expand * d_model}",
        )
        outside = [i for i in attention_layers if i not in range(num_layers)]
        require(not outside, f"attention_layers has {outside}; layers are 0 to {num_layers - 1}")
        kinds = ["attention" if i in attention_layers else "mamba2" for i in range(num_layers)]
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=tuple(
                part for kind in kinds for part in ((kind,) if mlp is None else (kind, "mlp"))
            ),
            attention=None if attention is None else _build(AttentionConfig, attention),
            mlp=None if mlp is None else _build(MlpConfig, mlp),
            mamba2=Mamba2Config(
                num_heads=expand * d_model // head_dim,
                head_dim=head_dim,
                state_size=state_size,
                **mixer,
            ),
            padded_vocab_size=padded_vocab_size,
            tie_embeddings=tie_embeddings,
            residual_float32=residual_float32,
            eos_token=eos_token,
        )

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """The shape of a published model, by name.

        Raises:
            ValueError: the name is unknown.
        """
        known = isinstance(name, str) and name in PRESETS
        require(known, f"unknown preset {shown(name)}; known: {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name]())

    @classmethod
    def tiny(cls, **changes: Any) -> "ModelConfig":
        """A model small enough to compile in a test; `changes` are arguments of `mamba2_lm`."""
        shape: dict[str, Any] = dict(
            vocab_size=37, d_model=16, num_layers=2, head_dim=8, state_size=8, chunk_size=8
        )
        return cls.mamba2_lm(**(shape | changes))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values, for `from_dict`. Infinity becomes the string "inf"."""
        return json.loads(json.dumps(_encode(dataclasses.asdict(self)), allow_nan=False))

    @classmethod
    def from_dict(cls, values: Any) -> "ModelConfig":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is unknown or missing, or a value is invalid.
        """
        require(
            isinstance(values, Mapping), f"a model config is a table of fields, got {values!r:.80}"
        )
        parts = dict(values)
        for name, part in _CONFIGS.items():
            if parts.get(name) is not None:
                parts[name] = _build(part, parts[name])
        return _build(cls, parts)


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _encode(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    return "inf" if value == math.inf else value


def _decode(value: Any) -> Any:
    """The inverse of `_encode` for a field, whose lists are not nested."""
    if isinstance(value, list | tuple):
        return tuple(math.inf if part == "inf" else part for part in value)
    return math.inf if value == "inf" else value


def _build(cls: type, values: Any) -> Any:
    require(
        isinstance(values, Mapping), f"{cls.__name__} needs a table of fields, got {values!r:.80}"
    )
    if isinstance(values.get("rope_scaling"), Mapping):
        values = {**values, "rope_scaling": _build(RopeScaling, values["rope_scaling"])}
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(map(str, set(values) - known))
    require(not unknown, f"{cls.__name__} has no fields {unknown!s:.80}; known: {sorted(known)}")
    values = {name: _decode(value) for name, value in values.items()}
    require_types(cls, values)
    try:
        return cls(**values)
    except TypeError as error:  # a missing field
        raise ValueError(f"{cls.__name__}: {error}") from None
