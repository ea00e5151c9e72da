"""Verification rules: the protocol, and the built-in rules by name in `VERIFIERS`.

Those of `LOSSY_VERIFIERS` change the distribution of the output: `generate(lossy=True)` only.
"""

from stree_jax.decoding.verifiers.base import BY_DEPTH, CHILD_SAMPLING, Verifier
from stree_jax.decoding.verifiers.following import FollowTarget, follow
from stree_jax.decoding.verifiers.rejection_sampling import RejectionSampling
from stree_jax.decoding.verifiers.traversal import Traversal
from stree_jax.decoding.verifiers.typical import Typical
from stree_jax.tree import TreeTopology

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


def default_verifier(
    child_sampling: str, topology: TreeTopology, *, temperature_is_zero: bool
) -> str:
    """The name of the exact rule for drafts chosen in this way."""
    if temperature_is_zero:
        return "greedy"
    if topology.num_nodes == 1 or child_sampling not in ("iid", "without_replacement"):
        return "target_only"
    if max(map(len, topology.children)) == 1:
        return "traversal"
    return "multi_step" if child_sampling == "iid" else "without_replacement"


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
    "default_verifier",
    "follow",
]
