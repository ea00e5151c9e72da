"""Verification rules: the protocol, and the built-in rules by name in `VERIFIERS`.

Those of `LOSSY_VERIFIERS` change the distribution of the output: `generate(lossy=True)` only.
"""

from stree_jax.decoding.verifiers.base import BY_DEPTH, CHILD_SAMPLING, Verifier
from stree_jax.decoding.verifiers.following import FollowTarget, follow
from stree_jax.decoding.verifiers.rejection_sampling import RejectionSampling
from stree_jax.decoding.verifiers.traversal import Traversal
from stree_jax.decoding.verifiers.typical import Typical

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
LOSSY_VERIFIERS: dict[str, Verifier] = {"typical": Typical()}

__all__ = [
    "BY_DEPTH",
    "CHILD_SAMPLING",
    "LOSSY_VERIFIERS",
    "VERIFIERS",
    "FollowTarget",
    "RejectionSampling",
    "Traversal",
    "Typical",
    "Verifier",
    "follow",
]
