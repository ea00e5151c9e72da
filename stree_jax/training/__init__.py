"""Training and distillation of small models, from text files to a native checkpoint."""

from stree_jax.training.recipe import Recipe, Text, Training
from stree_jax.training.run import (
    RunText,
    card_tables,
    distill,
    open_target,
    run_directory,
    run_text,
    train,
    weights_digest,
)
from stree_jax.training.trainer import Loss, Progress, evaluate, fit

__all__ = [
    "Loss",
    "Progress",
    "Recipe",
    "RunText",
    "Text",
    "Training",
    "card_tables",
    "distill",
    "evaluate",
    "fit",
    "open_target",
    "run_directory",
    "run_text",
    "train",
    "weights_digest",
]
