"""Verification rules: their base, and the built-in rules by name in `VERIFIERS`.

Those of `LOSSY_VERIFIERS` change the distribution of the output: `generate(lossy=True)` only.
"""

from typing import Any

from stree_jax.decoding.types import Drawn
from stree_jax.decoding.verifiers.base import CHILD_SAMPLING, Verifier
from stree_jax.decoding.verifiers.follow import Follow, follow
from stree_jax.decoding.verifiers.reject import Reject
from stree_jax.decoding.verifiers.traverse import Traverse
from stree_jax.decoding.verifiers.typical import Typical
from stree_jax.messages import shown
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
    if topology.width == 1:
        return "traversal"
    return "multi_step" if drawn.kind == "iid" else "without_replacement"


def verifier_of(verifier: str | Verifier | Any) -> Verifier:
    """The rule of this name, or a rule that a program can depend on."""
    if isinstance(verifier, str):
        known = VERIFIERS | LOSSY_VERIFIERS
        if verifier not in known:
            raise ValueError(
                f"unknown verifier {shown(verifier)}; known: {sorted(VERIFIERS)}, and lossy:"
                f" {sorted(LOSSY_VERIFIERS)}"
            )
        return known[verifier]
    if not isinstance(verifier, Verifier):
        raise ValueError(
            f"verifier must be one of {sorted(VERIFIERS)}, or of a class derived from"
            f" stree_jax.Verifier, got {shown(verifier)}"
        )
    try:
        hash((verifier, verifier.name))
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"verifier {type(verifier).__name__}: {error}; messages need its name, and compiled"
            " programs depend on it: make its class a frozen dataclass with a field `name`"
        ) from None
    return verifier


__all__ = [
    "CHILD_SAMPLING",
    "LOSSY_VERIFIERS",
    "VERIFIERS",
    "Reject",
    "Traverse",
    "Verifier",
    "default_verifier",
    "follow",
    "verifier_of",
]
