"""Flax NNX modules. Weights are modules whose methods mutate nothing; what flows is a pytree."""

from stree_jax.models.attention import AttentionConfig, RopeScaling
from stree_jax.models.config import build_config
from stree_jax.models.draft_head import DraftHead, TargetHead, require_inner_layers
from stree_jax.models.gated_delta import GatedDeltaConfig
from stree_jax.models.latent_attention import LatentAttentionConfig
from stree_jax.models.layer import LayerConfig, register
from stree_jax.models.layers import linear, output_logits
from stree_jax.models.lm import check_model, check_on_one_device, embedded_tokens, same_tokenizer
from stree_jax.models.mamba2 import Mamba2Config
from stree_jax.models.matrices import Matrix, named_weights
from stree_jax.models.mlp import MlpConfig
from stree_jax.models.moe import MoeConfig
from stree_jax.models.parallel import ParallelConfig
from stree_jax.models.shared import SharedConfig
from stree_jax.models.short_conv import ShortConvConfig

__all__ = [
    "AttentionConfig",
    "DraftHead",
    "GatedDeltaConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "Mamba2Config",
    "Matrix",
    "MlpConfig",
    "MoeConfig",
    "ParallelConfig",
    "RopeScaling",
    "SharedConfig",
    "ShortConvConfig",
    "TargetHead",
    "build_config",
    "check_model",
    "check_on_one_device",
    "embedded_tokens",
    "linear",
    "named_weights",
    "output_logits",
    "register",
    "require_inner_layers",
    "same_tokenizer",
]
