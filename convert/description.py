"""`Source`, the input of a family's reader; `Description`, its result; and shared helpers."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.convert.fields import Fields
from stree_jax.convert.rules import Ignored, Rule
from stree_jax.models import Mamba2Config
from stree_jax.models.config import ModelConfig


class Source(NamedTuple):
    """The raw contents of a checkpoint's files."""

    fields: Fields  # config.json or params.json
    beside: Mapping[str, Fields] = {}  # other config files, by file name
    tensors: Mapping[str, Tensor] = {}  # by name, read on demand
    quirks: Collection[str] = ()  # names from `families.QUIRKS` to reproduce


class HeadDescription(NamedTuple):
    """The head beside a model, according to the model's config.

    Attributes:
        config: its config; None: it cannot be read.
        rules: the tensors of its weights.
        problem: why it cannot be read; None: it can.
    """

    config: Any
    rules: list[Rule]
    problem: str | None = None


class Description(NamedTuple):
    """The model and the rules of a checkpoint, according to its config."""

    family: str
    config: ModelConfig
    rules: list[Rule]
    ignored: list[Ignored]  # tensors
    notes: list[str]  # ignored config fields, with reasons
    mtp: HeadDescription | None = None  # the multi-token prediction head


def norm_kind(has_norm: bool, norm_first: bool) -> str:
    """`Mamba2Config.norm` from the two flags that most configs have."""
    if not has_norm:
        return "none"
    return "norm_then_gate" if norm_first else "gate_then_norm"


def tied_head(config: ModelConfig, name: str) -> list[Ignored]:
    """The output head where it is tied: some checkpoints store it anyway."""
    if not config.tie_embeddings:
        return []
    return [Ignored(name, "the embedding again: tied", is_embedding=True)]


def of_head(names: Iterable[str]) -> list[Ignored]:
    """Tensors of the head beside a model."""
    return [Ignored(name, "part of a multi-token prediction head") for name in names]


def required(config: ModelConfig, kind: str) -> Any:
    """The first config of a kind of layer that the family always has; else a ValueError."""
    parts = (part for layer in config.layers for part in (layer, *layer.parts.values()))
    first = next((part for part in parts if part.kind == kind), None)
    if first is None:
        raise ValueError(f"it has no layer {kind!r}, only {sorted(set(config.kinds))}")
    return first


def limits(mixer: Mamba2Config) -> list[Any]:
    """The clamp of the time step in transformers 5's JSON."""
    low, high = mixer.dt_limit
    return [low, high if high < math.inf else {"__float__": "Infinity"}]


def hf_values(
    config: ModelConfig, dtype: str, model_type: str, architecture: str
) -> dict[str, Any]:
    """Fields of every transformers config."""
    eos = config.eos_token
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        # transformers has no field for the unpadded size, so it may sample a padding id.
        "vocab_size": config.num_embeddings,
        "hidden_size": config.d_model,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "bos_token_id": None,
        "pad_token_id": None,
    }
