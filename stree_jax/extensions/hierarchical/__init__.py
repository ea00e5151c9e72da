"""Three levels of models: two draft models take turns, or one is itself sped up by drafts."""

from stree_jax.extensions.hierarchical.cascade import CascadeDrafter
from stree_jax.extensions.hierarchical.interleaved import InterleavedDrafter

__all__ = ["CascadeDrafter", "InterleavedDrafter"]
