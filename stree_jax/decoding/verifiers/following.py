"""Verifiers that follow the target: one token at every node, and the child that carries it.

Exact for any tree and any drafter, because the drafts have no part in the choice.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import best_of
from stree_jax.array_types import Array, Float32, Int, Key
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import DraftTree, Sampling, Verdict
from stree_jax.tree import TreeTopology


@dataclasses.dataclass(frozen=True)
class Following:
    """Follows the target's choice: its best token at temperature 0, else a sample from it.

    Attributes:
        name: what users call it.
        only_at_zero: refuse temperatures above 0.
    """

    name: str
    only_at_zero: bool = False

    def check(
        self, child_sampling: str, topology: TreeTopology, *, temperature_is_zero: bool
    ) -> None:
        """See `Verifier`."""
        if self.only_at_zero and not temperature_is_zero:
            raise ValueError(
                f"verifier {self.name!r} is exact at temperature 0 only; use 'target_only'"
            )

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
        """See `Verifier`."""
        if self.only_at_zero or sampling.temperature_is_zero:
            return follow(draft, best_of(logits)[0])
        log_probs = token_log_probs(logits, sampling)
        return follow(draft, jax.vmap(jax.random.categorical)(keys, log_probs).astype(jnp.int32))


def follow(draft: DraftTree, chosen: Int[Array, "B N"]) -> Verdict:
    """Follows, from the root on, the first child whose token is the one chosen at its parent."""
    tree, tokens = draft.tree, draft.tokens
    nodes = jnp.arange(tokens.shape[1])
    at_parent = jnp.take_along_axis(chosen, jnp.maximum(tree.parents, 0), axis=1)
    # Among siblings with the same token only the first counts: trying the second too, with a
    # choice of its own below, would favour whichever goes deeper.
    same = (
        (tree.parents[:, :, None] == tree.parents[:, None, :])
        & (tokens[:, :, None] == tokens[:, None, :])
        & (nodes < nodes[:, None])
        & tree.valid[:, None, :]
    )
    match = tree.valid & (tokens == at_parent) & ~same.any(-1) & (nodes > 0)
    reached = ~(tree.ancestor_mask & ~match[:, None, :] & (nodes > 0)).any(-1) & tree.valid
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=-1).astype(jnp.int32)
    depth, token = (
        jnp.take_along_axis(values, last[:, None], axis=1)[:, 0] for values in (tree.depth, chosen)
    )
    return Verdict(last, depth, token)
