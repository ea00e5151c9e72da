"""Verifiers that choose one token per node from the target, and follow the child that has it.

Exact for any tree and any drafter, because the drafts have no influence on the choice. Above
temperature 0 the choice depends on the logits and on the noise of the node's output position, so
the text is the one that autoregressive decoding draws with the same key.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Bool, Int
from stree_jax.decoding.sampling import best_token, sample_tokens
from stree_jax.decoding.types import DraftTree, Drawn, Step, Verdict
from stree_jax.decoding.verifiers.base import Verifier
from stree_jax.tree import Tree, TreeTopology


@dataclasses.dataclass(frozen=True)
class Follow(Verifier):
    """Follows the target's best token at temperature 0, and its sample above it."""

    name: str = "target_only"
    only_at_zero: bool = False  # it refuses temperatures above 0
    follows_target: ClassVar[bool] = True

    def check(self, drawn: Drawn, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        if self.only_at_zero and not temperature_is_zero:
            raise ValueError(
                f"verifier {self.name!r} is exact at temperature 0 only; use 'target_only'"
            )

    def verify(
        self, draft: DraftTree, logits: Array, step: Step, topology: TreeTopology
    ) -> Verdict:
        if self.only_at_zero or step.sampling.temperature_is_zero:
            return follow(draft, best_token(logits)[0])
        assert step.noise is not None
        return follow(draft, sample_tokens(logits, step.noise, draft.tree.depth, step.sampling))


def follow(draft: DraftTree, chosen: Int[Array, "B N"]) -> Verdict:
    """Walks from the root down, each time to the first child that has its parent's chosen token.

    Args:
        draft: the draft tree; invalid nodes are not followed.
        chosen: one token per node, chosen independently of the drafts.

    Returns:
        The path, and the token chosen at its last node.
    """
    tree, tokens = draft.tree, draft.tokens
    nodes = np.arange(tokens.shape[1])[None]
    at_parent = jnp.take_along_axis(chosen, jnp.maximum(tree.parents, 0), axis=1)
    # Among siblings with the same token only the first counts. The second has its own chosen token,
    # and taking whichever goes deeper would favour long paths.
    same = (
        (tree.parents[:, :, None] == tree.parents[:, None, :])
        & (tokens[:, :, None] == tokens[:, None, :])
        & (nodes < nodes.T)[None]
        & tree.valid[:, None, :]
    )
    accepted = tree.valid & (tokens == at_parent) & ~same.any(-1)
    return deepest(tree, accepted, chosen)


def deepest(tree: Tree, accepted: Bool[Array, "B N"], chosen: Int[Array, "B N"]) -> Verdict:
    """The path to the deepest node whose ancestors are all accepted, the first among equals."""
    rejected = ~accepted & (np.arange(accepted.shape[1])[None] > 0)
    reached = ~(tree.ancestor_mask & rejected[:, None, :]).any(-1) & tree.valid
    last = lax.argmax(jnp.where(reached, tree.depth, -1), 1, jnp.int32)
    depth, token = (
        jnp.take_along_axis(values, last[:, None], axis=1)[:, 0] for values in (tree.depth, chosen)
    )
    return Verdict(last, depth, token)
