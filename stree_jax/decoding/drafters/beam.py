"""Drafting by beam search: the draft model chooses the shape of the tree.

STree, section 5.1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.decoding.drafters.base import root_only
from stree_jax.decoding.drafters.model import ModelDrafter, ModelDraftState
from stree_jax.decoding.sampling import all_finite
from stree_jax.decoding.types import Context, DraftTree, Sampling, Verdict
from stree_jax.models.cache import Path, Pending, path_to
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
        finite = []
        for width, next_width in itertools.pairwise(_widths(topology)):
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
        none = jnp.full(topology.num_nodes, -1, jnp.int32)
        draft = DraftTree(tokens, tree, None, none, jnp.stack(finite).all(axis=0))
        return draft, state._replace(cache=cache, pending=pending)

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
        read = Tree(
            parents=draft.tree.parents[:, :num_read],
            depth=draft.tree.depth[:, :num_read],
            ancestor_mask=draft.tree.ancestor_mask[:, :num_read, :num_read],
            valid=draft.tree.valid[:, :num_read],
        )
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
        return topology.num_nodes - _widths(topology)[-1]


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


def _widths(topology: TreeTopology) -> list[int]:
    """Number of nodes of each level, the root's first."""
    return [topology.depths.count(depth) for depth in range(topology.depth + 1)]


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
