"""Beam search over the continuations of a text, and the trees that it grows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.models.cache import Pending
from stree_jax.tree import Tree


class Continuations(NamedTuple):
    """The candidates of one step of the search: the best continuations of each beam."""

    score: Float32[Array, "B beams ranks"]  # best first
    tokens: Int[Array, "B beams ranks"]
    kept: Int[Array, "B kept"]  # indices of the next beams among all candidates, best first


class Found(NamedTuple):
    """The result of the search: the root and the beams of all levels."""

    tokens: Int[Array, "B nodes"]
    tree: Tree
    score: Float32[Array, "B beams"]  # log-probability of each path of the last level
    pending: Pending
    finite: Bool[Array, " B"]
    candidates: list[Continuations]  # with an axis of levels before the others


def best_continuations(
    score: Float32[Array, "B beams"], logits: Float[Array, "B beams V"], count: int
) -> tuple[Float32[Array, "B kept"], Int[Array, "B kept"], Int[Array, "B kept"], Continuations]:
    """One step of beam search.

    Args:
        score: log-probability of each beam.
        logits: next-token logits of each beam.
        count: number of continuations to keep, at most `beams * V`.

    Returns:
        The `count` best continuations, best first: log-probability, the beam that each continues,
        and the token that it adds. Impossible continuations have log-probability `-inf`. Then all
        candidates.
    """
    # At most `count` of the best continue one beam, so the second sort is small.
    best, tokens = lax.top_k(logits, min(count, logits.shape[-1]))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # Rounding must not put a continuation above its beam.
    scores = score[..., None] + jnp.minimum(best - total, 0.0).astype(jnp.float32)
    batch, _, per_beam = best.shape
    kept, chosen = lax.top_k(scores.reshape(batch, -1), count)
    chosen, tokens = chosen.astype(jnp.int32), tokens.astype(jnp.int32)
    added = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)
    return kept, chosen // per_beam, added, Continuations(scores, tokens, chosen)


def append(tree: Tree, parents: Int[Array, "B added"], valid: Bool[Array, "B added"]) -> Tree:
    """Appends nodes below existing nodes of the tree."""
    batch, num_nodes = tree.parents.shape
    num_new = parents.shape[1]
    above = jnp.take_along_axis(tree.ancestor_mask, parents[..., None], axis=1)
    itself = jnp.eye(num_new, dtype=bool) & valid[:, None, :]
    old = jnp.concatenate([tree.ancestor_mask, above], axis=1)
    new = jnp.concatenate([jnp.zeros((batch, num_nodes, num_new), bool), itself], axis=1)
    depth = jnp.take_along_axis(tree.depth, parents, axis=1) + 1
    return Tree(
        parents=jnp.concatenate([tree.parents, parents], axis=1),
        depth=jnp.concatenate([tree.depth, depth], axis=1),
        ancestor_mask=jnp.concatenate([old, new], axis=2),
        valid=jnp.concatenate([tree.valid, valid], axis=1),
    )


def first_nodes(tree: Tree, count: int) -> Tree:
    """The tree of the first `count` nodes."""
    return Tree(
        parents=tree.parents[:, :count],
        depth=tree.depth[:, :count],
        ancestor_mask=tree.ancestor_mask[:, :count, :count],
        valid=tree.valid[:, :count],
    )


def below_catch_up(tree: Tree, has_catch_up: Bool[Array, " B"]) -> Tree:
    """The draft model's own tree: the catch-up token, if there is one, above the root of `tree`."""

    def before(value: Array, rest: Array) -> Array:
        return jnp.concatenate([value[:, None], rest], axis=1)

    none = jnp.full_like(tree.parents[:, 0], -1)
    parents = jnp.where(tree.parents < 0, jnp.where(has_catch_up, 0, -1)[:, None], tree.parents + 1)
    mask = before(jnp.zeros_like(tree.valid), tree.ancestor_mask)
    caught_up = jnp.broadcast_to(has_catch_up[:, None, None], (*mask.shape[:2], 1))
    return Tree(
        parents=before(none, parents),
        depth=before(jnp.zeros_like(none), tree.depth + has_catch_up[:, None]),
        ancestor_mask=jnp.concatenate([caught_up, mask], axis=2),
        valid=before(has_catch_up, tree.valid),
    )
