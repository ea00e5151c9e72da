"""Verification rules: the protocol, and the built-in rules by name in `VERIFIERS`.

Those of `LOSSY_VERIFIERS` change the distribution of the output: `generate(lossy=True)` only.
"""

from stree_jax.decoding.types import Drawn
from stree_jax.decoding.verifiers.base import CHILD_SAMPLING, Verifier
from stree_jax.decoding.verifiers.follow import Follow, follow
from stree_jax.decoding.verifiers.reject import Reject
from stree_jax.decoding.verifiers.traverse import Traverse
from stree_jax.decoding.verifiers.typical import Typical
from stree_jax.tree import TreeTopology

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Follow("greedy", only_at_zero=True),
        Follow("target_only"),
        Reject("multi_step", exact_for="iid"),
        Reject("without_replacement", exact_for="without_replacement"),
        Traverse(),
    )
}

LOSSY_VERIFIERS: dict[str, Verifier] = {"typical": Typical()}


def default_verifier(drawn: Drawn, topology: TreeTopology, *, temperature_is_zero: bool) -> str:
    """The name of the exact rule for drafts chosen in this way."""
    if temperature_is_zero:
        return "greedy"
    if topology.num_nodes == 1 or not drawn.is_sampled:
        return "target_only"
    if max(map(len, topology.children)) == 1:
        return "traversal"
    return "multi_step" if drawn.kind == "iid" else "without_replacement"


__all__ = [
    "CHILD_SAMPLING",
    "LOSSY_VERIFIERS",
    "VERIFIERS",
    "Follow",
    "Reject",
    "Traverse",
    "Typical",
    "Verifier",
    "default_verifier",
    "follow",
]
