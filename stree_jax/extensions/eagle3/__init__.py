"""EAGLE-3 heads (Li et al., 2025, arXiv:2503.01840): drafts from inner states of the target."""

from stree_jax.extensions.eagle3.drafter import Eagle3Drafter, load_eagle3
from stree_jax.extensions.eagle3.model import Eagle3Model
from stree_jax.models import Eagle3Config, Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Head", "Eagle3Model", "load_eagle3"]
