"""What a checkpoint is, and what the families share in saying so."""

import math
from typing import Any, NamedTuple

from stree_jax.config import ModelConfig
from stree_jax.convert.rules import Ignored, Rule
from stree_jax.layer_config import Mamba2Config


class Description(NamedTuple):
    """What a checkpoint is, as its config tells."""

    family: str
    config: ModelConfig
    rules: list[Rule]
    ignored: list[Ignored]  # tensors
    notes: list[str]  # config fields that were left aside, and why


def norm_kind(has_norm: bool, norm_first: bool) -> str:
    """`Mamba2Config.norm` in the words of most configs."""
    if not has_norm:
        return "none"
    return "norm_then_gate" if norm_first else "gate_then_norm"


def tied_head(config: ModelConfig, name: str) -> list[Ignored]:
    """A head that is stored although it is the embedding."""
    if not config.tie_embeddings:
        return []
    return [Ignored(name, "the embedding again: tied", is_embedding=True)]


def mixer_of(config: ModelConfig) -> Mamba2Config:
    """The Mamba-2 mixer, which every family has.

    Raises:
        ValueError: the model has none.
    """
    if config.mamba2 is None:
        raise ValueError(f"layers = {config.layers} have no Mamba-2")
    return config.mamba2


def limits(mixer: Mamba2Config) -> list[Any]:
    """The clamp of the time step, in transformers 5's JSON."""
    low, high = mixer.dt_limit
    return [low, high if high < math.inf else {"__float__": "Infinity"}]


def hf_values(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Fields that all transformers configs have."""
    eos = config.eos_token
    return {
        "architectures": [architecture],
        "model_type": model_type,
        # transformers has no unpadded size; it may then sample an id that means nothing.
        "vocab_size": config.num_embeddings,
        "hidden_size": config.d_model,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "bos_token_id": None,
        "pad_token_id": None,
    }
