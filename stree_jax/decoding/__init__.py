"""Drafters, verifiers and the one loop that runs them."""

from stree_jax.decoding.options import Plan
from stree_jax.decoding.prefill import prefill
from stree_jax.decoding.reader import Reader
from stree_jax.decoding.sampling import all_finite, filtered_logits, position_noise

__all__ = ["Plan", "Reader", "all_finite", "filtered_logits", "position_noise", "prefill"]
