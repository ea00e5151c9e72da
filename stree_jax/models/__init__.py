"""Flax NNX modules. Weights are modules whose methods mutate nothing; what flows is a pytree."""

from pallas_kernels.numerics import contract
from stree_jax.models.cache import Cache, Path, Pending, empty_path, path_to
from stree_jax.models.config import build_config
from stree_jax.models.draft_head import DraftHead
from stree_jax.models.layers import linear, output_logits
from stree_jax.models.lm import (
    HybridLM,
    check_model,
    check_on_one_device,
    embedded_tokens,
    same_tokenizer,
)
from stree_jax.models.matrices import Matrix, Table, loaded_for, named_weights, weights_by_name
from stree_jax.names import flatten

__all__ = [
    "Cache",
    "DraftHead",
    "HybridLM",
    "Matrix",
    "Path",
    "Pending",
    "Table",
    "build_config",
    "check_model",
    "check_on_one_device",
    "contract",
    "embedded_tokens",
    "empty_path",
    "flatten",
    "linear",
    "loaded_for",
    "named_weights",
    "output_logits",
    "path_to",
    "same_tokenizer",
    "weights_by_name",
]
