"""Drafters propose trees of tokens: their base, the built-in drafters, and parts of your own."""

from stree_jax.decoding.drafters.base import Drafter, draft_models, drawn_by, root_only, root_token
from stree_jax.decoding.drafters.children import check_child_sampling, drawn_children
from stree_jax.decoding.drafters.dynamic import DynamicDrafter
from stree_jax.decoding.drafters.model import HeadDrafter, ModelDrafter
from stree_jax.decoding.drafters.ngram import NgramDrafter
from stree_jax.decoding.drafters.search import BeamDrafter

__all__ = [
    "BeamDrafter",
    "Drafter",
    "DynamicDrafter",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "check_child_sampling",
    "draft_models",
    "drawn_by",
    "drawn_children",
    "root_only",
    "root_token",
]
