"""`ModelConfig`: the architecture and sizes of a model.

All model families share the same layers. A family is a config, not a class.
"""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from stree_jax.checks import check_int, plain_fields, require, require_integer
from stree_jax.mesh.partition import Cut
from stree_jax.messages import shown
from stree_jax.models.attention import AttentionConfig
from stree_jax.models.latent_attention import LatentAttentionConfig as LatentAttentionConfig
from stree_jax.models.layer import KINDS, LayerConfig, share, within
from stree_jax.models.mamba2 import Mamba2Config
from stree_jax.models.mlp import MlpConfig
from stree_jax.models.parallel import ParallelConfig as ParallelConfig  # registers its kind
from stree_jax.models.presets import PRESETS

_MAX_LAYERS = 8192  # a damaged or hostile file may claim any number
# The others' outputs may have a norm that is not computed yet.
_SANDWICHED = ("short_conv", "attention", "mlp", "moe")
_MOST_SHARDS = 256  # suggested by error messages


def _of_all(kind: str) -> Any:
    said = f"The config of all {kind} layers; None: there is none. ValueError: they differ."
    return property(lambda self: self._only(kind), doc=said)


@dataclasses.dataclass(frozen=True, init=False)
class ModelConfig:
    """A whole language model.

    Layers may differ in kind and in size. Where all layers of a kind have one config, it is shorter
    to name kinds: `ModelConfig(..., layers=("mamba2", "mlp") * 8, mamba2=Mamba2Config(...),
    mlp=MlpConfig(...))`. `dataclasses.replace(config, mamba2=...)` gives all Mamba-2 layers another
    config.

    Attributes:
        vocab_size: size of the vocabulary; ids from here to `padded_vocab_size` are never sampled.
        d_model: width of the residual stream `M`.
        layers: the config of each layer, first to last.
        padded_vocab_size: rows of the embedding; None means `vocab_size`.
        norm_eps: epsilon of the norms on the residual stream.
        tie_embeddings: the output head is the transposed embedding.
        residual_float32: keep the residual stream in float32, whatever the dtype of the weights.
        sandwich_norms: each layer's output has a norm too, before the residual add (LFM3).
        norm_float32: keep the scales of the norms on it in float32 (Qwen3.5, whose are `1 + w`).
        embedding_multiplier, residual_multiplier, logits_multiplier: scale the embedding, each
            layer's output before the residual add, and the logits (Granite, Falcon-H1).
        eos_token: end-of-sequence id, or a tuple of several; None if unknown.
        max_length: context length in tokens. `generate` refuses longer requests unless told
            otherwise. None means no limit.

    Args:
        mamba2, attention, mlp, moe, shared, gated_delta, short_conv, or another registered kind:
            the configs of layers that are given by their kind. With "parallel" layers both
            Mamba-2's and attention's; with "shared" ones attention's and the MLP's too.

    Raises:
        ValueError: a bad value, an unknown kind, or a kind without its configs.
    """

    vocab_size: int
    d_model: int
    layers: tuple[LayerConfig, ...]
    padded_vocab_size: int | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    residual_float32: bool = True
    norm_float32: bool = False
    sandwich_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    eos_token: int | tuple[int, ...] | None = None
    max_length: int | None = None

    # Types are checked below, with the names of the fields.
    def __init__(self, vocab_size: Any, d_model: Any, layers: Any, **fields: Any):
        known = {field.name: field.default for field in dataclasses.fields(self)}
        parts = {kind: fields.pop(kind, None) for kind in KINDS if kind not in known}
        if strange := fields.keys() - known:
            raise TypeError(f"ModelConfig() got an unexpected keyword argument {min(strange)!r}")
        required = dict(vocab_size=vocab_size, d_model=d_model, layers=layers)
        for name, value in (known | fields | required).items():
            object.__setattr__(self, name, value)
        require_integer(self, "vocab_size", 1)
        require_integer(self, "d_model", 1)
        object.__setattr__(self, "layers", _layers(layers, parts))
        self._check()
        # Every call of a jitted function hashes the config; of 64 layers that takes 66 us.
        hashed = hash(tuple(getattr(self, name) for name in known))
        object.__setattr__(self, "_hash", hashed)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        # Recomputed when unpickled: hashes of strings differ between processes.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(type(self), **fields), ()

    def _check(self) -> None:
        require_integer(self, "padded_vocab_size", 1, optional=True)
        require_integer(self, "max_length", 1, optional=True, bits=48)
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
        for layer, below in zip(self.layers, (*self.layers[1:], None), strict=True):
            layer.check_next(below)
            require(
                not any(part.norm_after for part in layer.parts.values()),
                f"norm_after is for layers, not for parts of a {layer.kind!r} layer",
            )
        strange = [x.kind for x in self.layers if x.norm_after or x.kind not in _SANDWICHED]
        require(
            not (self.sandwich_norms and strange),
            f"sandwich_norms is for {_SANDWICHED} without norm_after, got {strange!s:.80}",
        )
        require(
            len({layer for layer in self.layers if layer.is_shared}) <= 1,
            "'shared' layers of one model have one config, since they share their blocks",
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def distinct_layers(self) -> tuple[LayerConfig, ...]:
        """The configs that occur, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layers))

    mamba2 = _of_all("mamba2")
    gated_delta = _of_all("gated_delta")
    short_conv = _of_all("short_conv")
    attention = _of_all("attention")
    mlp = _of_all("mlp")
    moe = _of_all("moe")
    shared = _of_all("shared")

    def _only(self, name: str) -> Any:
        parts = [({layer.kind: layer} | layer.parts).get(name) for layer in self.distinct_layers]
        configs = {part for part in parts if part is not None}
        require(
            len(configs) <= 1, f"layers differ in their {name} configs: read them from `layers`"
        )
        return next(iter(configs), None)

    def with_layers(self, layers: Sequence[LayerConfig | str], **parts: Any) -> "ModelConfig":
        """The model with other layers: configs, or kinds, with its own configs or `parts`.

        Raises:
            ValueError: the model has no config for a kind, or several.
        """
        kinds = {layer for layer in layers if isinstance(layer, str) and layer in KINDS}
        names = {name for kind in kinds for name in (kind, *KINDS[kind].joined_kinds())}
        configs = {name: self._only(name) for name in names - {*parts}} | parts
        new: Any = [_with_parts(layer, configs) if layer in kinds else layer for layer in layers]
        return dataclasses.replace(self, layers=tuple(new))

    def local(self, shards: int) -> "ModelConfig":
        """The config of one of the equal shards of a model; ValueError: they cannot be equal."""
        if obstacle := self._obstacle(shards):
            fitting = [n for n in range(1, _MOST_SHARDS + 1) if self._obstacle(n) is None]
            last = f" or {fitting[-1]}" if fitting[1:] else "1 only"
            ways = ", ".join(map(str, fitting[:-1])) + last
            raise ValueError(f"{obstacle}; model = ... can be {ways}")
        if shards == 1:
            return self
        local_of = {layer: layer.local(shards) for layer in self.distinct_layers}
        return dataclasses.replace(
            self,
            layers=tuple(local_of[layer] for layer in self.layers),
            vocab_size=share(self.num_embeddings, shards),
            padded_vocab_size=None,
            eos_token=None,
        )

    def _obstacle(self, shards: int) -> str | None:
        """Says why the model cannot be split into this many shards; else None."""
        of_layers = [layer.sizes(shards) for layer in self.distinct_layers]
        equal = [*(sizes.equal for sizes in of_layers), {"padded_vocab_size": self.num_embeddings}]
        for name, size in (item for table in equal for item in table.items()):
            if size % shards:
                return f"{name} = {size} does not fit model = {shards}: it is no multiple"
        for name, size in (item for sizes in of_layers for item in sizes.shared.items()):
            if size % shards and shards % size:
                return f"{name} = {size} does not fit model = {shards}: neither divides the other"
        return None

    def cuts(self, shards: int) -> dict[str, Cut]:
        """The cut of each weight by name; weights without one are replicated."""
        if shards == 1:
            return {}
        words = Cut(0, ((self.num_embeddings, 1),))
        table = {"embedding": words, "head": words}
        of_layer = {layer: layer.cuts(shards) for layer in self.distinct_layers}
        for i, layer in enumerate(self.layers):
            table |= within(f"blocks.{i}.mixer", of_layer[layer])
        if (shared := self.shared) is not None:
            for j in range(shared.num_blocks):
                table |= within(f"shared.{j}", LayerConfig.cuts(shared, shards))  # of its parts
        return table

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
        layout. Other arguments are fields of `ModelConfig`.

        Args:
            expand: inner width of the mixer as a multiple of `d_model`.
            head_dim, state_size: `P` and `S`.
            attention_layers: indices of layers with attention instead of Mamba-2.
            attention: fields of `AttentionConfig` for these layers.
            mlp: fields of `MlpConfig` for an MLP after each of the `num_layers`; None: no MLPs.
            **mixer: more fields of `Mamba2Config`.

        Raises:
            ValueError: `head_dim` does not divide `expand * d_model`, or `attention_layers` has an
                index out of range.
        """
        check_int("d_model", d_model, 1)
        check_int("num_layers", num_layers, 1, _MAX_LAYERS)
        check_int("expand", expand, 1)
        check_int("head_dim", head_dim, 1)
        require(
            expand * d_model % head_dim == 0,
            f"head_dim = {head_dim} does not divide expand * d_model = {expand * d_model}",
        )
        require(
            isinstance(attention_layers, Sequence),
            f"attention_layers must be a list of layers, got {shown(attention_layers)}",
        )
        outside = [i for i in attention_layers if i not in range(num_layers)]
        require(
            not outside, f"attention_layers has {shown(outside)}; layers are 0 to {num_layers - 1}"
        )
        kinds = ["attention" if i in attention_layers else "mamba2" for i in range(num_layers)]
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=tuple(
                part for kind in kinds for part in ((kind,) if mlp is None else (kind, "mlp"))
            ),
            attention=None if attention is None else build_config(AttentionConfig, attention),
            mlp=None if mlp is None else build_config(MlpConfig, mlp),
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
        """The shape of a published model, by name."""
        known = isinstance(name, str) and name in PRESETS
        require(known, f"unknown preset {shown(name)}; known: {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name])

    @classmethod
    def tiny(cls, **changes: Any) -> "ModelConfig":
        """A model that compiles fast in a test; `changes` are arguments of `mamba2_lm`."""
        shape: dict[str, Any] = dict(
            vocab_size=37, d_model=16, num_layers=2, head_dim=8, state_size=8, chunk_size=8
        )
        return cls.mamba2_lm(**(shape | changes))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values, for `from_dict`. Infinity becomes the string "inf".

        `configs` has the different layers by name, and `layers` the name of each layer.
        """
        names: dict[LayerConfig, str] = {}
        for layer in self.distinct_layers:
            same = sum(named.kind == layer.kind for named in names)
            names[layer] = f"{layer.kind}.{same + 1}" if same else layer.kind
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "layers"
        }
        values["layers"] = [names[layer] for layer in self.layers]
        values["configs"] = {
            name: {"kind": layer.kind} | dataclasses.asdict(layer) for layer, name in names.items()
        }
        return json.loads(json.dumps(_encode(values), allow_nan=False))

    @classmethod
    def from_dict(cls, values: Any) -> "ModelConfig":
        """The inverse of `to_dict`; also reads format 1, with a config per kind."""
        require(
            isinstance(values, Mapping), f"a model config is a table of fields, got {values!r:.80}"
        )
        fields = dict(values)
        if "configs" in fields:
            fields["layers"] = _named_layers(fields.get("layers"), fields.pop("configs"))
        else:
            for kind, config in KINDS.items():
                if fields.get(kind) is not None:
                    fields[kind] = build_config(config, fields[kind])
        return build_config(cls, fields)


def _layers(layers: Any, parts: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """The layers, with those given by their kind made of `parts`."""
    require(
        isinstance(layers, list | tuple)
        and all(isinstance(layer, LayerConfig | str) for layer in layers),
        f"layers must be tuple of layer configs or their kinds, got {layers!r:.80}",
    )
    require(len(layers) >= 1, "layers is empty; a model has at least one layer")
    require(
        len(layers) <= _MAX_LAYERS,
        f"layers has {len(layers)} entries; at most {_MAX_LAYERS} are possible",
    )
    for layer in layers:
        require(
            isinstance(layer, str) or hasattr(layer, "kind"),
            f"{type(layer).__name__} is no registered kind of layer: decorate the class with"
            ' `register("name")` of stree_jax.models',
        )
    for name, part in parts.items():
        require(
            part is None or isinstance(part, KINDS[name]),
            f"{name} must be the config of such a layer, got {part!r:.80}",
        )
    unknown = sorted({layer for layer in layers if isinstance(layer, str)} - set(KINDS))
    require(not unknown, f"unknown layer kinds {unknown!s:.80}; known: {list(KINDS)}")
    config_of = {layer: _with_parts(layer, parts) for layer in dict.fromkeys(layers)}
    return tuple(config_of[layer] for layer in layers)


def _with_parts(layer: LayerConfig | str, configs: Mapping[str, Any]) -> LayerConfig:
    """A layer, or that of a kind, with these configs; ValueError: one is missing."""
    cls = KINDS[layer] if isinstance(layer, str) else type(layer)
    whole = [config for config in (configs.get(cls.kind), layer) if isinstance(config, LayerConfig)]
    parts = {}
    for name in cls.joined_kinds():
        candidates = [configs.get(name), *(getattr(config, name) for config in whole)]
        parts[name] = next((part for part in candidates if part is not None), None)
    if not whole and len(parts) < len(dataclasses.fields(cls)):
        parts[cls.kind] = None
    for name, part in parts.items():
        require(
            part is not None,
            f"layers has {cls.kind!r} but the {name} config is missing;"
            " `ModelConfig.with_layers` takes it from another model's layers",
        )
    return dataclasses.replace(whole[0], **parts) if whole else cls(**parts)


def _named_layers(names: Any, configs: Any) -> tuple[LayerConfig, ...]:
    """The layers of a stored config."""
    require(isinstance(configs, Mapping), f"configs is a table of layers, got {configs!r:.80}")
    require(
        isinstance(names, list | tuple) and all(isinstance(name, str) for name in names),
        f"layers must be names of `configs`, got {names!r:.80}",
    )
    missing = sorted(set(names) - set(configs))
    require(not missing, f"layers has {missing!s:.80}, which configs lacks")
    config_of = {}
    for name, values in configs.items():
        require(
            isinstance(values, Mapping), f"configs[{name!r:.40}] is a table, got {values!r:.80}"
        )
        config_of[name] = _of_kind("layer kinds", values)
    return tuple(config_of[name] for name in names)


def _of_kind(what: str, values: Mapping[str, Any]) -> LayerConfig:
    """The layer of a table with its kind."""
    fields = dict(values)
    kind = fields.pop("kind", None)
    require(
        isinstance(kind, str) and kind in KINDS,
        f"unknown {what} {kind!r:.80}; known: {list(KINDS)}. A kind of your own must be registered"
        " before its checkpoint is loaded",
    )
    return build_config(KINDS[kind], fields)


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _encode(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    return "inf" if value == math.inf else value


def _decode(name: str, value: Any, kind: Any) -> Any:
    """The inverse of `_encode` for a field of a type without nested lists."""
    if isinstance(value, Mapping):
        if "kind" in value:
            return _of_kind(name, value)
        for part in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(part):
                return build_config(part, value)  # type: ignore[arg-type]
        return value
    if isinstance(value, list | tuple):
        return tuple(math.inf if part == "inf" else part for part in value)
    return math.inf if value == "inf" else value


def build_config(cls: type, values: Any) -> Any:
    """A config from a table of its fields; ValueError: a field or a value is wrong."""
    require(
        isinstance(values, Mapping), f"{cls.__name__} needs a table of fields, got {values!r:.80}"
    )
    values = dict(values)
    if cls is Mamba2Config:  # older checkpoints name the only activation that there was
        activation = values.pop("activation", "silu")
        require(activation == "silu", f"activation must be 'silu', got {activation!r:.80}")
    known = {field.name: field.type for field in dataclasses.fields(cls)}
    if cls is ModelConfig:
        known = dict.fromkeys(KINDS) | known
    unknown = sorted(map(str, set(values) - set(known)))
    require(not unknown, f"{cls.__name__} has no fields {unknown!s:.80}; known: {sorted(known)}")
    values = {name: _decode(name, value, known[name]) for name, value in values.items()}
    values = plain_fields(cls, values)
    try:
        return cls(**values)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{cls.__name__}: {error}") from None
