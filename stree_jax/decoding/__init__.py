"""Drafters, verifiers and the one loop that runs them."""

from stree_jax.decoding.head_reader import HeadModel, HeadReader, outputs_ahead
from stree_jax.decoding.options import Plan
from stree_jax.decoding.prefill import prefill
from stree_jax.decoding.reader import DraftModel, Reader, WholeModel, nodes_so_far, recorded
from stree_jax.decoding.sampling import all_finite, filtered_logits, position_noise

__all__ = [
    "DraftModel",
    "HeadModel",
    "HeadReader",
    "Plan",
    "Reader",
    "WholeModel",
    "all_finite",
    "filtered_logits",
    "nodes_so_far",
    "outputs_ahead",
    "position_noise",
    "prefill",
    "recorded",
]
