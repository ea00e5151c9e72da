"""Training and distillation of small models, from text files to a native checkpoint."""

from stree_jax.training.heads import HeadPlan, train_heads
from stree_jax.training.objective import ahead_loss, divergence
from stree_jax.training.recipe import Recipe, Training
from stree_jax.training.run import distill, train
from stree_jax.training.trainer import Progress

__all__ = [
    "HeadPlan",
    "Progress",
    "Recipe",
    "Training",
    "ahead_loss",
    "distill",
    "divergence",
    "train",
    "train_heads",
]
