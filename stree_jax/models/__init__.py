"""Flax NNX modules. Weights are modules whose methods mutate nothing; what flows is a pytree."""

from pallas_kernels.numerics import contract
from stree_jax.models.attention import AttentionConfig, RopeScaling
from stree_jax.models.cache import Cache, Path, Pending, empty_path, path_to
from stree_jax.models.config import build_config
from stree_jax.models.draft_head import DraftHead
from stree_jax.models.gated_delta import GatedDeltaConfig
from stree_jax.models.layer import LayerConfig, register
from stree_jax.models.layers import linear, output_logits
from stree_jax.models.lm import (
    HybridLM,
    check_model,
    check_on_one_device,
    embedded_tokens,
    same_tokenizer,
)
from stree_jax.models.mamba2 import Mamba2Config
from stree_jax.models.matrices import Matrix, loaded_for, named_weights, weights_by_name
from stree_jax.models.mlp import MlpConfig
from stree_jax.models.moe import MoeConfig
from stree_jax.models.parallel import ParallelConfig
from stree_jax.models.shared import SharedConfig
from stree_jax.names import flatten

__all__ = [
    "AttentionConfig",
    "Cache",
    "DraftHead",
    "GatedDeltaConfig",
    "HybridLM",
    "LayerConfig",
    "Mamba2Config",
    "Matrix",
    "MlpConfig",
    "MoeConfig",
    "ParallelConfig",
    "Path",
    "Pending",
    "RopeScaling",
    "SharedConfig",
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
    "register",
    "same_tokenizer",
    "weights_by_name",
]
