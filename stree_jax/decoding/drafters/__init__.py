"""Drafters propose trees of tokens: the protocol, and the built-in drafters."""

from stree_jax.decoding.drafters.base import Drafter, root_only, root_token
from stree_jax.decoding.drafters.beam import BeamDrafter
from stree_jax.decoding.drafters.cascade import CascadeDrafter
from stree_jax.decoding.drafters.dynamic import DynamicDrafter
from stree_jax.decoding.drafters.interleaved import InterleavedDrafter
from stree_jax.decoding.drafters.medusa import MedusaDrafter
from stree_jax.decoding.drafters.model import ModelDrafter, ModelDraftState
from stree_jax.decoding.drafters.ngram import NgramDrafter
from stree_jax.models.lm import HybridLM

__all__ = [
    "BeamDrafter",
    "CascadeDrafter",
    "Drafter",
    "DynamicDrafter",
    "InterleavedDrafter",
    "MedusaDrafter",
    "ModelDraftState",
    "ModelDrafter",
    "NgramDrafter",
    "draft_models",
    "root_only",
    "root_token",
]


def draft_models(drafter: Drafter | None) -> list[HybridLM]:
    """The models of a built-in drafter, which must have the target's vocabulary."""
    match drafter:
        case ModelDrafter():
            return [drafter.model]
        case InterleavedDrafter():
            return [drafter.medium, drafter.small]
        case CascadeDrafter():
            return [drafter.medium, *draft_models(drafter.inner)]
    return []
