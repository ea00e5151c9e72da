"""Verification rules: the protocol, and the built-in rules by name in `VERIFIERS`."""

from stree_jax.decoding.verifiers.base import CHILD_SAMPLING, Verifier
from stree_jax.decoding.verifiers.following import Following, follow
from stree_jax.decoding.verifiers.testing import Testing

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Following("greedy", only_at_zero=True),
        Following("target_only"),
        Testing("multi_step", exact_for="iid"),
        Testing("without_replacement", exact_for="without_replacement"),
        Testing("chain", exact_for="iid", chains_only=True),
    )
}

__all__ = ["CHILD_SAMPLING", "VERIFIERS", "Following", "Testing", "Verifier", "follow"]
