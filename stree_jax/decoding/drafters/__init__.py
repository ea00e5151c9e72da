"""Drafters propose trees of tokens: the protocol, and the built-in drafters."""

from stree_jax.decoding.drafters.base import Drafter, root_only, root_token
from stree_jax.decoding.drafters.beam import BeamDrafter
from stree_jax.decoding.drafters.dynamic import DynamicDrafter
from stree_jax.decoding.drafters.model import ModelDrafter, ModelDraftState
from stree_jax.decoding.drafters.ngram import NgramDrafter

__all__ = [
    "BeamDrafter",
    "Drafter",
    "DynamicDrafter",
    "ModelDraftState",
    "ModelDrafter",
    "NgramDrafter",
    "root_only",
    "root_token",
]
