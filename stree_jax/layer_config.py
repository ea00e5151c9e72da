"""The configs of all kinds of layers; each is at home in its mixer's file in `stree_jax.models`."""

from stree_jax.models.attention import AttentionConfig, RopeScaling
from stree_jax.models.layer import LayerConfig, register
from stree_jax.models.mamba2 import Mamba2Config
from stree_jax.models.mlp import MlpConfig
from stree_jax.models.moe import MoeConfig
from stree_jax.models.parallel import ParallelConfig
from stree_jax.models.shared import SharedConfig

__all__ = [
    "AttentionConfig",
    "LayerConfig",
    "Mamba2Config",
    "MlpConfig",
    "MoeConfig",
    "ParallelConfig",
    "RopeScaling",
    "SharedConfig",
    "register",
]
