"""The protocol of verifiers: from the target's logits at a draft tree to one path of it."""

from typing import Protocol, runtime_checkable

from stree_jax.array_types import Array, Float32, Key
from stree_jax.decoding.types import DraftTree, Sampling, Verdict
from stree_jax.tree import TreeTopology

# How a drafter chooses the children of a node: its best tokens, or tokens drawn from its
# distribution. A verifier is exact for some of these.
CHILD_SAMPLING = ("top_k", "iid", "without_replacement")


@runtime_checkable
class Verifier(Protocol):
    """A verification rule, traced into the decode loop.

    Hashable and immutable: a compiled program depends on it. `generate(verifier=...)` takes any
    object with these methods, such as one that wraps a built-in of `VERIFIERS` and delegates.
    """

    @property
    def name(self) -> str:
        """For messages; an attribute will do."""
        ...

    def check(
        self, child_sampling: str, topology: TreeTopology, *, temperature_is_zero: bool
    ) -> None:
        """Refuses a pairing whose output would not be the target's. Called before compilation.

        Args:
            child_sampling: the drafter's, one of `CHILD_SAMPLING` or a name of its own.
            topology: of the draft tree, nodes in level order.
            temperature_is_zero: the target's best token is the only one possible.

        Raises:
            ValueError: naming the pairing and what to use instead.
        """
        ...

    def verify(
        self,
        keys: Key[Array, " B"],
        draft: DraftTree,
        logits: Float32[Array, "B N V"],
        sampling: Sampling,
        noise: Float32[Array, "B _ V"] | None,
        *,
        topology: TreeTopology,
    ) -> Verdict:
        """Picks a path of each row's tree, and the token after it.

        Args:
            keys: one a row, for this step.
            draft: the tree; where rows have fewer nodes, `draft.tree.valid` is False.
            logits: the target's at every node, without vocabulary padding.
            sampling: temperature, top-k and top-p of each row.
            noise: noise that the drafter shared; None: it shared none.
            topology: of the tree, nodes in level order.
        """
        ...
