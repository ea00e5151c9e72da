"""Drafters propose trees of tokens: the protocol, the built-in drafters, and parts of your own."""

from typing import TYPE_CHECKING

from stree_jax.decoding.drafters.base import (
    Drafter,
    check_request,
    draft_models,
    drawn_by,
    resumed,
    root_only,
    root_token,
)
from stree_jax.decoding.drafters.beam import BeamDrafter
from stree_jax.decoding.drafters.children import (
    check_child_sampling,
    chosen_child_sampling,
    draw,
    shared_scores,
)
from stree_jax.decoding.drafters.dynamic import DynamicDrafter
from stree_jax.decoding.drafters.model import ModelDrafter, ModelDraftState
from stree_jax.decoding.drafters.ngram import NgramDrafter
from stree_jax.lazy import lazily

# Moved to the extensions.
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "CascadeDrafter": "stree_jax.extensions.hierarchical",
            "InterleavedDrafter": "stree_jax.extensions.hierarchical",
            "MedusaDrafter": "stree_jax.extensions.medusa",
        },
    )

__all__ = [
    "BeamDrafter",
    "Drafter",
    "DynamicDrafter",
    "ModelDraftState",
    "ModelDrafter",
    "NgramDrafter",
    "check_child_sampling",
    "check_request",
    "chosen_child_sampling",
    "draft_models",
    "draw",
    "drawn_by",
    "resumed",
    "root_only",
    "root_token",
    "shared_scores",
]
