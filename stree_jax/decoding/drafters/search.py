"""Drafting by beam search: all beams of all steps are drafted.

STree, section 5.1 (Wu, Qin, Wong and Soatto, 2025, arXiv:2505.14969).
"""

import collections
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.drafters.base import drawn_by, root_only
from stree_jax.decoding.drafters.levels import Level, grow_levels
from stree_jax.decoding.drafters.model import ModelDraftState, RunsModel
from stree_jax.decoding.sampling import all_finite, best_tokens
from stree_jax.decoding.types import DraftTree, Step
from stree_jax.tree import Tree, TreeTopology, first_nodes, put, take


class Continuations(NamedTuple):
    """The candidates of one step of the search: the best continuations of each beam."""

    score: Float32[Array, "B beams ranks"]  # best first
    tokens: Int[Array, "B beams ranks"]
    kept: Int[Array, "B kept"]  # indices of the next beams among all candidates, best first


class SearchTree(NamedTuple):
    """The root and the beams of all levels; nodes of levels to come are not valid."""

    tokens: Int[Array, "B nodes"]
    tree: Tree
    score: Float32[Array, "B nodes"]  # log of the chance of the path to each node
    states: Any  # of the logits processors
    model_state: Any
    finite: Bool[Array, " B"]


def best_continuations(
    score: Float32[Array, "B beams"], logits: Float[Array, "B beams V"], count: int
) -> tuple[Float32[Array, "B kept"], Int[Array, "B kept"], Int[Array, "B kept"], Continuations]:
    """One step of beam search."""
    # At most `count` of the best continue one beam, so the second sort is small.
    best, tokens = best_tokens(logits, min(count, logits.shape[-1]))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # Rounding must not put a continuation above its beam.
    scores = score[..., None] + jnp.minimum(best - total, 0.0).astype(jnp.float32)
    batch, _, per_beam = best.shape
    kept, chosen = lax.top_k(scores.reshape(batch, -1), count)
    chosen = chosen.astype(jnp.int32)
    added = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)
    return kept, chosen // per_beam, added, Continuations(scores, tokens, chosen)


class BeamDrafter(RunsModel):
    """A draft model that grows a tree by beam search, from one state.

    A level of the tree is one step of the search: the most probable *paths* among all continuations
    of the level above, best first. Tokens stay in the tree when their beam is dropped later, so w
    beams and n steps are 1 + w n nodes. The topology, such as `TreeTopology.beam(w, n)`, gives the
    number of nodes of each level; how they connect is data.

    The search is deterministic and uses the model's probabilities at temperature 1, and those of a
    confidence head, whatever the request's temperature, so only verifiers that follow the target
    accept it: "greedy" and "target_only".
    Among equally probable paths the earlier beam comes first, then the lower token id.

    Args:
        model: any model with the target's vocabulary, or heads such as `MtpModel`.

    Raises:
        ValueError: `model` is not a model.
    """

    chooses_shape = True

    def default_topology(self) -> TreeTopology:
        """Three beams for four steps: the level sizes of the paper's tree A."""
        return TreeTopology.beam(3, 4)

    def widths(self, topology: TreeTopology) -> list[int]:
        """Nodes of each level of the search, the root's first; the model does not run the last."""
        counts = collections.Counter(topology.depths)
        return [counts[depth] for depth in range(topology.depth + 1)]

    def num_read(self, topology: TreeTopology) -> int:
        return sum(self.widths(topology)[:-1])

    def weighed(self, logits: Array, step: Step, depth: int | Array) -> Array:
        """From the logits at nodes of a depth, those whose softmax has the probabilities."""
        return logits

    def kept(
        self, search_tree: SearchTree, candidates: list[Continuations], topology: TreeTopology
    ) -> tuple[Int[Array, "B N"], Tree, Int[Array, "B N"]]:
        """Tokens and tree of the nodes to draft, and the `place` of each, see `ModelDraftState`."""
        nodes = np.arange(topology.num_nodes, dtype=np.int32)
        place = np.where(nodes < self.num_read(topology), nodes, -1)
        return (
            search_tree.tokens,
            search_tree.tree,
            jnp.broadcast_to(place, search_tree.tokens.shape),
        )

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> ModelDraftState:
        """See `Drafter`: with an empty tree."""
        state = super().init(batch, topology, max_length)
        num_read = self.num_read(topology)
        read = TreeTopology.chain(num_read - 1).tree(jnp.zeros((batch, num_read), bool))
        return state._replace(read=read, place=jnp.zeros((batch, topology.num_nodes), jnp.int32))

    def draft_tree(self, model_state: Any, step: Step, topology: TreeTopology) -> tuple[Any, ...]:
        """See `RunsModel`: with the tree that was run, and places in it."""
        is_zero = step.sampling.temperature_is_zero
        drawn = drawn_by(self, topology, temperature_is_zero=is_zero)
        search_tree, candidates = self.search(model_state, step, topology)
        tokens, tree, place = self.kept(search_tree, candidates, topology)
        draft = DraftTree.of(tokens, tree, search_tree.finite, drawn)
        return (
            draft,
            search_tree.model_state,
            first_nodes(search_tree.tree, self.num_read(topology)),
            place,
        )

    def search(
        self, model_state: Any, step: Step, topology: TreeTopology
    ) -> tuple[SearchTree, list[Continuations]]:
        """All nodes, and the candidates of each step, with an axis of levels before the others."""
        model, widths = self.draft_model, self.widths(topology)
        start, num_nodes, num_read = root_only(step.context), sum(widths), sum(widths[:-1])

        def grow(
            search_tree: SearchTree, at: Level, width: int
        ) -> tuple[SearchTree, Continuations]:
            tree = search_tree.tree
            nodes = search_tree.tokens[:, at.nodes], first_nodes(tree, num_read), at.read
            logits, model_state = model.run(search_tree.model_state, *nodes)
            beams = jnp.where(at.read.nodes < num_read, search_tree.score[:, at.nodes], -jnp.inf)
            # The children of a node share the chance that the draft is right there.
            beams += model.log_confidence(model_state, *nodes)
            masked = step.processors.masked(logits, take(search_tree.states, at.nodes))
            scores = self.weighed(masked, step, at.depth)
            score, beam, tokens, level = best_continuations(beams, scores, width)
            valid, parents = jnp.isfinite(score), at.nodes[0] + beam
            above = jnp.take_along_axis(tree.ancestor_mask, parents[..., None], axis=1)
            itself = jnp.arange(num_nodes, dtype=jnp.int32)[None] == at.children[:, None]
            depth = jnp.take_along_axis(tree.depth, parents, axis=1) + 1
            added = Tree(parents, depth, above | (itself[None] & valid[..., None]), valid)
            search_tree = SearchTree(
                put(search_tree.tokens, at.children, tokens),
                Tree(*(put(old, at.children, new) for old, new in zip(tree, added, strict=True))),
                put(search_tree.score, at.children, score),
                step.processors.grown(search_tree.states, at.children, parents, tokens),
                model_state,
                search_tree.finite & all_finite(logits).all(axis=-1),
            )
            return search_tree, level

        firsts = itertools.accumulate(widths, initial=0)
        nodes = [list(range(first, after)) for first, after in itertools.pairwise(firsts)]

        def room(leaf: Array) -> Array:
            return jnp.pad(leaf, [(0, 0)] + [(0, num_nodes - 1)] * (leaf.ndim - 1))

        begun = SearchTree(
            room(start.tokens),
            jax.tree.map(room, start.tree),
            room(jnp.zeros(start.tokens.shape, jnp.float32)),
            step.processors.room(num_nodes),
            model_state,
            start.finite,
        )
        pairs = enumerate(itertools.pairwise(nodes))
        levels = [Level(depth, here, here, below) for depth, (here, below) in pairs]
        return grow_levels(grow, begun, levels, widths[1:])

    def own_tree(
        self, state: ModelDraftState, draft: DraftTree, topology: TreeTopology
    ) -> tuple[Any, Any]:
        return state.read, state.place
