"""Three levels of models: two draft models take turns."""

from stree_jax.extensions.hierarchical.interleaved import InterleavedDrafter

__all__ = ["InterleavedDrafter"]
