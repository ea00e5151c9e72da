"""Training and distillation of small models, from text files to a native checkpoint."""

from stree_jax.training.heads import HeadPlan, train_heads
from stree_jax.training.objective import ahead_loss
from stree_jax.training.recipe import Recipe, Text, Training
from stree_jax.training.run import distill, train
from stree_jax.training.trainer import Loss, Progress, evaluate, fit

__all__ = [
    "HeadPlan",
    "Loss",
    "Progress",
    "Recipe",
    "Text",
    "Training",
    "ahead_loss",
    "distill",
    "evaluate",
    "fit",
    "train",
    "train_heads",
]
