"""Drafting by beam search: the draft model chooses the shape of the tree.

STree, section 5.1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.decoding.drafters.base import root_only
from stree_jax.decoding.drafters.levels import (
    MAX_UNROLLED,
    level_behind,
    padded,
    widths_of,
    with_level,
    with_zeros,
)
from stree_jax.decoding.drafters.model import ModelDrafter, ModelDraftState
from stree_jax.decoding.sampling import all_finite
from stree_jax.decoding.types import Context, DraftTree, Sampling, Verdict
from stree_jax.models.cache import Cache, Path, Pending, path_to
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology


class BeamDrafter(ModelDrafter):
    """A draft model that grows a tree by beam search, from one state.

    A level of the tree is one step of the search: the most probable *paths* among all continuations
    of the level above, best first. Tokens stay in the tree when their beam is dropped later, so w
    beams and n steps are 1 + w n nodes. The topology, such as `TreeTopology.beam(w, n)`, gives the
    number of nodes of each level; how they connect is data.

    The search is deterministic and uses the model's probabilities at temperature 1, whatever the
    temperature is, so only verifiers that follow the target accept it: "greedy" and "target_only".
    Among equally probable paths the earlier beam comes first, then the lower token id.

    Args:
        model: any model with the target's vocabulary.

    Raises:
        ValueError: `model` is not a model.
    """

    def __init__(self, model: HybridLM):
        super().__init__(model, child_sampling="top_k")

    def default_topology(self) -> TreeTopology:
        """Three beams for four steps: the level sizes of the paper's tree A."""
        return TreeTopology.beam(3, 4)

    def propose(
        self,
        state: ModelDraftState,
        context: Context,
        keys: Key[Array, " B"],
        sampling: Sampling,
        topology: TreeTopology,
        noise: Float32[Array, "B _ V"] | None = None,
    ) -> tuple[DraftTree, ModelDraftState]:
        """See `Drafter`."""
        start = root_only(context)
        tree, tokens = start.tree, start.tokens
        score = jnp.zeros(tokens.shape)  # log-probability of each path of the level
        queries = jnp.concatenate([state.catch_up[:, None], tokens], axis=1)
        replay: tuple[Pending, Path] | None = (state.pending, state.path)
        cache, pending = state.cache, None
        widths, finite = widths_of(topology), []
        num_unrolled = topology.depth if topology.depth <= MAX_UNROLLED else 1
        for width, next_width in itertools.pairwise(widths[: num_unrolled + 1]):
            logits, pending, cache = self.model.tree_forward(
                queries,
                _below_catch_up(tree, state.has_catch_up),
                cache,
                replay=replay,
                prefix_pending=pending,
                num_logits=width,
            )
            replay = None
            logits = logits[..., : self.model.config.vocab_size]
            finite.append(all_finite(logits).all(axis=-1))
            score, beam, queries = best_continuations(score, logits, next_width)
            first = tree.parents.shape[1] - width  # of the level's nodes
            tree = append(tree, first + beam, jnp.isfinite(score))
            tokens = jnp.concatenate([tokens, queries], axis=1)

        assert pending is not None  # a tree with drafts has a level
        grown = _Beams(tokens, tree, score, pending, jnp.stack(finite).all(axis=0))
        if num_unrolled < topology.depth:
            grown = self._search(grown, state, cache, topology)
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        draft = DraftTree(grown.tokens, grown.tree, None, none, grown.finite)
        return draft, state._replace(cache=cache, pending=grown.pending)

    def _search(
        self, start: "_Beams", state: ModelDraftState, cache: Cache, topology: TreeTopology
    ) -> "_Beams":
        """Grows the levels below the root's in one loop, see `levels`."""
        widths, num_read = widths_of(topology), self._num_read(topology)
        firsts = itertools.accumulate(widths, initial=0)
        levels = [list(range(first, after)) for first, after in itertools.pairwise(firsts)]
        num_nodes, most = topology.num_nodes, max(widths)
        places = (
            padded(levels[1:-1], width=most),
            1 + padded(levels[1:-1], num_read, most),  # behind the catch-up token
            padded(levels[2:], num_nodes, most),
        )

        def grow(so_far: _Beams, at: tuple[Array, Array, Array]) -> tuple[_Beams, None]:
            tree, (nodes, queries, added) = so_far.tree, at
            own_tree = _below_catch_up(_first_nodes(tree, num_read), state.has_catch_up)
            logits, read, _ = self.model.tree_forward(
                so_far.tokens[:, nodes],
                level_behind(own_tree, queries),
                cache,
                prefix_pending=so_far.pending,
                num_logits=most,
            )
            logits = logits[..., : self.model.config.vocab_size]
            score, beam, tokens = best_continuations(so_far.score, logits, most)
            score = jnp.where(added < num_nodes, score, -jnp.inf)  # no beams beyond the level's
            valid, parents = jnp.isfinite(score), nodes[0] + beam
            above = jnp.take_along_axis(tree.ancestor_mask, parents[..., None], axis=1)
            itself = (jnp.arange(num_nodes) == added[:, None]) & valid[..., None]
            depth = jnp.take_along_axis(tree.depth, parents, axis=1) + 1

            def put(before: Array, new: Array) -> Array:
                return before.at[:, added].set(new, mode="drop")

            return (
                _Beams(
                    put(so_far.tokens, tokens),
                    Tree(*map(put, tree, (parents, depth, above | itself, valid))),
                    score,
                    with_level(so_far.pending, read, queries),
                    so_far.finite & all_finite(logits).all(axis=-1),
                ),
                None,
            )

        tree = Tree(*(with_zeros(part, num_nodes) for part in start.tree))
        no_beam = jnp.full((start.score.shape[0], most - widths[1]), -jnp.inf)
        start = _Beams(
            with_zeros(start.tokens, num_nodes),
            tree._replace(ancestor_mask=with_zeros(tree.ancestor_mask, num_nodes, axis=2)),
            jnp.concatenate([start.score, no_beam], axis=1),
            jax.tree.map(lambda leaf: with_zeros(leaf, 1 + num_read), start.pending),
            start.finite,
        )
        return lax.scan(grow, start, jax.tree.map(jnp.asarray, places))[0]

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        topology: TreeTopology,
        hidden: Float[Array, "B M"],
    ) -> ModelDraftState:
        """See `Drafter`."""
        num_read = self._num_read(topology)
        ended = verdict.last < 0
        last = jnp.maximum(verdict.last, 0)
        unread = (last >= num_read) & ~ended
        parent, token = (
            jnp.take_along_axis(values, last[:, None], axis=1)[:, 0]
            for values in (draft.tree.parents, draft.tokens)
        )
        read = _first_nodes(draft.tree, num_read)
        return state._replace(
            path=path_to(
                _below_catch_up(read, state.has_catch_up),
                jnp.where(ended, -1, 1 + jnp.where(unread, parent, last)),
            ),
            catch_up=token,
            has_catch_up=unread,
        )

    def _num_read(self, topology: TreeTopology) -> int:
        """All nodes but the last level's, dropped beams included."""
        return topology.num_nodes - widths_of(topology)[-1]


def best_continuations(
    score: Float32[Array, "B beams"], logits: Float[Array, "B beams V"], count: int
) -> tuple[Float32[Array, "B kept"], Int[Array, "B kept"], Int[Array, "B kept"]]:
    """One step of beam search.

    Args:
        score: log-probability of each beam.
        logits: of the token after it.
        count: continuations to keep, at most `beams * V`.

    Returns:
        The `count` best continuations, best first: log-probability, the beam that each continues,
        and the token that it adds. Impossible continuations have log-probability `-inf`.
    """
    # At most `count` of the best continue one beam, so the second sort is small.
    best, tokens = lax.top_k(logits, min(count, logits.shape[-1]))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    scores = score[..., None] + (best - total).astype(jnp.float32)
    batch, _, per_beam = best.shape
    kept, chosen = lax.top_k(scores.reshape(batch, -1), count)
    added = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)
    return kept, chosen.astype(jnp.int32) // per_beam, added.astype(jnp.int32)


def append(tree: Tree, parents: Int[Array, "B added"], valid: Bool[Array, "B added"]) -> Tree:
    """The tree with more nodes, whose parents are nodes that it has."""
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


class _Beams(NamedTuple):
    """A draft tree while it grows."""

    tokens: Int[Array, "B N"]
    tree: Tree
    score: Float32[Array, "B beams"]  # log-probability of each path of the last level
    pending: Pending
    finite: Bool[Array, " B"]


def _first_nodes(tree: Tree, count: int) -> Tree:
    return Tree(
        parents=tree.parents[:, :count],
        depth=tree.depth[:, :count],
        ancestor_mask=tree.ancestor_mask[:, :count, :count],
        valid=tree.valid[:, :count],
    )


def _below_catch_up(tree: Tree, has_catch_up: Bool[Array, " B"]) -> Tree:
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
