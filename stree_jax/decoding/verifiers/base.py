"""The base of verifiers: from the target's logits at a draft tree to one path of it."""

import abc
from typing import ClassVar

from stree_jax.array_types import Array, Float32
from stree_jax.decoding.types import DraftTree, Drawn, Step, Verdict
from stree_jax.tree import TreeTopology

# Kinds of `Drawn`. A rule that compares draft and target probabilities is exact for the last two
# at most.
CHILD_SAMPLING = ("top_k", "shared", "iid", "without_replacement")


class Verifier(abc.ABC):
    """A verification rule: the base of all that `generate(verifier=...)` takes.

    Immutable and hashable, such as a frozen dataclass without arrays: it is part of the compilation
    key. Two that are equal share a program, so equal ones must compute the same.

    A rule may wrap a built-in one of `VERIFIERS` and delegate to it. `docs/extending.md` explains
    what is static and what is traced; `examples/own_verifier.py` is one.

    Attributes:
        name: its name in messages.
        lossless: False if it keeps neither the target's tokens nor their distribution; `generate`
            then requires `lossy=True`.
        follows_target: True if it takes each node's token from the target alone, by its logits and
            `Step.noise`: the `Scheduler` then decodes requests at temperature 0 and above it
            together, `bench` compares texts, `assert_lossless` too, and shards of a mesh trust
            equal logits to give equal verdicts. A rule with its own random numbers keeps the
            distribution alone.
    """

    name: str
    lossless: ClassVar[bool] = True
    follows_target: ClassVar[bool] = False

    @abc.abstractmethod
    def check(self, drawn: Drawn, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        """Refuses every pairing whose output would not be the target's.

        Called in Python, before anything is compiled.

        Args:
            drawn: how the drafter chooses siblings. A rule that reads `draft.log_probs` must refuse
                kinds that it does not know.
            topology: the draft tree, nodes in level order.
            temperature_is_zero: whether all rows have temperature 0.

        Raises:
            ValueError: the output would not be the target's. The message names the pairing and what
                to use instead.
        """

    @abc.abstractmethod
    def verify(
        self, draft: DraftTree, logits: Float32[Array, "B N V"], step: Step, topology: TreeTopology
    ) -> Verdict:
        """Picks a root-to-node path of each row's tree, and the token after it. Traced.

        Args:
            draft: the draft tree. Nodes that are not `valid` must not be accepted; `draft.drawn`
                is what `check` accepted.
                Siblings are in the order in which they were drawn, and may carry the same token.
            logits: the target's logits at every node, without vocabulary padding; not filtered.
            step: the text so far, random keys, noise and sampling settings.
            topology: the draft tree, nodes in level order. A dynamic drafter may have chosen
                another shape of the same size: `draft.tree` has the shape.

        Returns:
            The path and the token after it. The loop cuts the path at the end of sequence and at
            the token limit, and ignores rows that have ended.
        """
