"""Three levels of models: two draft models take turns, or a draft model has its own drafter."""

from stree_jax.extensions.hierarchical.cascade import CascadeDrafter
from stree_jax.extensions.hierarchical.interleaved import InterleavedDrafter

__all__ = ["CascadeDrafter", "InterleavedDrafter"]
