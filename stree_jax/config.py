"""`ModelConfig`, whose home is `stree_jax.models.config`."""

from stree_jax.models.config import LAYER_KINDS, PARTS, ModelConfig

__all__ = ["LAYER_KINDS", "PARTS", "ModelConfig"]
