"""Verification rules: the protocol, and the built-in rules by name in `VERIFIERS`."""

from stree_jax.decoding.verifiers.base import BY_DEPTH, CHILD_SAMPLING, Verifier
from stree_jax.decoding.verifiers.following import FollowTarget, follow
from stree_jax.decoding.verifiers.rejection_sampling import RejectionSampling
from stree_jax.decoding.verifiers.traversal import Traversal

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        FollowTarget("greedy", only_at_zero=True),
        FollowTarget("target_only"),
        RejectionSampling("multi_step", exact_for="iid"),
        RejectionSampling("without_replacement", exact_for="without_replacement"),
        Traversal("traversal", exact_for="without_replacement"),
    )
}

__all__ = [
    "BY_DEPTH",
    "CHILD_SAMPLING",
    "VERIFIERS",
    "FollowTarget",
    "RejectionSampling",
    "Traversal",
    "Verifier",
    "follow",
]
