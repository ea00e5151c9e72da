"""The protocol of verifiers: from the target's logits at a draft tree to one path of it."""

from typing import Protocol, runtime_checkable

from stree_jax.array_types import Array, Float32, Key
from stree_jax.decoding.types import DraftTree, Sampling, Verdict
from stree_jax.tree import TreeTopology

# How a drafter chooses the children of a node, see `Drafter.child_sampling`. A rule that compares
# draft and target probabilities is exact for one of these only.
CHILD_SAMPLING = ("top_k", "shared", "iid", "without_replacement")
# Suffix of the last two: drawn once per depth, and shared by all nodes of that depth.
BY_DEPTH = "_by_depth"


@runtime_checkable
class Verifier(Protocol):
    """A verification rule: `generate(verifier=...)` takes any object with these methods.

    Immutable and hashable, such as a frozen dataclass without arrays: it is part of the compilation
    key. Two that are equal share a program, so equal ones must compute the same.

    A rule that keeps neither the target's tokens nor their distribution has an attribute
    `lossless = False`; `generate` then requires `lossy=True`.

    A rule may wrap a built-in one of `VERIFIERS` and delegate to it. `docs/extending.md` explains
    what is static and what is traced; `examples/own_verifier.py` is one.
    """

    @property
    def name(self) -> str:
        """Name of the rule in messages; an attribute will do."""
        ...

    def check(
        self, child_sampling: str, topology: TreeTopology, *, temperature_is_zero: bool
    ) -> None:
        """Refuses every pairing whose output would not be the target's.

        Called in Python, before anything is compiled.

        Args:
            child_sampling: the drafter's choice of siblings: a name from `CHILD_SAMPLING`, or the
                drafter's own name, which a rule that reads `draft.log_probs` must refuse.
            topology: the draft tree, nodes in level order.
            temperature_is_zero: whether all rows have temperature 0.

        Raises:
            ValueError: the output would not be the target's. The message names the pairing and what
                to use instead.
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
        """Picks a root-to-node path of each row's tree, and the token after it. Traced.

        Args:
            keys: one per row and step. Split a key before using it twice.
            draft: the draft tree. Nodes that are not `valid` must not be accepted.
                Siblings are in the order in which they were drawn, and may carry the same token.
            logits: the target's logits at every node, without vocabulary padding; not filtered.
            sampling: temperature, top-k and top-p of each row, and two static flags.
            noise: Gumbel noise of the next `topology.depth + 1` output positions, for
                `sample_tokens`; None at temperature 0. Pass it on when delegating.
            topology: the draft tree, nodes in level order. A dynamic drafter may have chosen
                another shape of the same size: `draft.tree` has the shape.

        Returns:
            The path and the token after it. The loop cuts the path at the end of sequence and at
            the token limit, and ignores rows that have ended.
        """
        ...
