"""Beam search over the continuations of a text, and the trees that it grows."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.drafters.base import root_only
from stree_jax.decoding.drafters.levels import grow_levels
from stree_jax.decoding.drafters.model import ModelDraftState, RunsModel
from stree_jax.decoding.nodes import put, take
from stree_jax.decoding.reader import DraftModel
from stree_jax.decoding.sampling import all_finite
from stree_jax.decoding.types import DraftTree, Step, Verdict
from stree_jax.tree import Tree, TreeTopology, first_nodes


class Continuations(NamedTuple):
    """The candidates of one step of the search: the best continuations of each beam."""

    score: Float32[Array, "B beams ranks"]  # best first
    tokens: Int[Array, "B beams ranks"]
    kept: Int[Array, "B kept"]  # indices of the next beams among all candidates, best first


class Found(NamedTuple):
    """The root and the beams of all levels; nodes of levels to come are not valid."""

    tokens: Int[Array, "B nodes"]
    tree: Tree
    score: Float32[Array, "B nodes"]  # log-probability of the path to each node
    states: Any  # of the logits processors
    reader: Any
    finite: Bool[Array, " B"]


class _At(NamedTuple):
    """A level of the search."""

    depth: Any
    nodes: Any
    read: Any  # the same; where padding, a node that there is not
    added: Any  # the nodes of the next level


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


class Searches(RunsModel):
    """The base of drafters that choose the nodes of a tree by beam search.

    Args:
        model: the draft model.

    Raises:
        ValueError: `model` is not a model.
    """

    chooses_shape = True  # see `Drafter`

    def widths(self, topology: TreeTopology) -> list[int]:
        """Nodes of each level of the search, the root's first; the model does not run the last."""
        raise NotImplementedError

    def num_read(self, topology: TreeTopology) -> int:
        return sum(self.widths(topology)[:-1])

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> ModelDraftState:
        """See `Drafter`: with an empty tree."""
        state = super().init(batch, topology, max_length)
        place = jnp.zeros((batch, topology.num_nodes), jnp.int32)
        return state._replace(read=_no_tree(batch, self.num_read(topology)), place=place)

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> ModelDraftState:
        reader = self.draft_model.commit(
            state.reader, state.read, state.place, draft, verdict, hidden
        )
        return state._replace(reader=reader)


def search(
    model: DraftModel,
    reader: Any,
    step: Step,
    widths: list[int],
    weigh: Callable[[Array, int | Array], Array],
) -> tuple[Found, list[Continuations]]:
    """Beam search over the continuations of the texts, which keeps all candidates.

    Args:
        model: the draft model.
        reader: its state.
        step: see `Drafter.propose`.
        widths: nodes of each level, the root's first; the model does not run the last level.
        weigh: from the logits at nodes of a depth, those whose softmax has the probabilities.

    Returns:
        All nodes, and the candidates of each step, with an axis of levels before the others.
    """
    start, num_nodes, num_read = root_only(step.context), sum(widths), sum(widths[:-1])
    batch = len(start.tokens)

    def grow(found: Found, at: _At, width: int) -> tuple[Found, Continuations]:
        tree = found.tree
        logits, reader = model.run(
            found.reader, found.tokens[:, at.nodes], first_nodes(tree, num_read), at.read
        )
        beams = jnp.where(at.read < num_read, found.score[:, at.nodes], -jnp.inf)
        masked = step.processors.masked(logits, take(found.states, at.nodes))
        score, beam, tokens, level = best_continuations(beams, weigh(masked, at.depth), width)
        valid, parents = jnp.isfinite(score), at.nodes[0] + beam
        above = jnp.take_along_axis(tree.ancestor_mask, parents[..., None], axis=1)
        itself = (jnp.arange(num_nodes) == at.added[:, None]) & valid[..., None]
        depth = jnp.take_along_axis(tree.depth, parents, axis=1) + 1
        added = Tree(parents, depth, above | itself, valid)
        return (
            Found(
                put(found.tokens, at.added, tokens),
                Tree(*(put(old, at.added, new) for old, new in zip(tree, added, strict=True))),
                put(found.score, at.added, score),
                step.processors.grown(found.states, at.added, parents, tokens),
                reader,
                found.finite & all_finite(logits).all(axis=-1),
            ),
            level,
        )

    firsts = itertools.accumulate(widths, initial=0)
    nodes = [list(range(first, after)) for first, after in itertools.pairwise(firsts)]
    root = _no_tree(batch, num_nodes)
    return grow_levels(
        grow,
        Found(
            jnp.zeros((batch, num_nodes), jnp.int32).at[:, :1].set(start.tokens),
            Tree(
                root.parents.at[:, 0].set(-1),
                root.depth,
                root.ancestor_mask.at[:, 0, 0].set(True),
                root.valid.at[:, 0].set(True),
            ),
            _no_score(model.ready(reader), batch, num_nodes),
            step.processors.room(num_nodes),
            reader,
            start.finite,
        ),
        [_At(d, here, here, below) for d, (here, below) in enumerate(itertools.pairwise(nodes))],
        _At(0, None, num_read, num_nodes),
        widths[1:],
        model.num_before(reader) + num_read,
    )


def _no_score(
    ready: Bool[Array, " B"] | None, batch: int, num_nodes: int
) -> Float32[Array, "B nodes"]:
    """Zeros; for a row that is not ready minus infinity, with which nothing continues its root."""
    zeros = jnp.zeros((batch, num_nodes))
    return zeros if ready is None else jnp.where(ready[:, None], zeros, -jnp.inf)


def _no_tree(batch: int, num_nodes: int) -> Tree:
    zeros = jnp.zeros((batch, num_nodes), jnp.int32)
    nowhere = jnp.zeros((batch, num_nodes, num_nodes), bool)
    return Tree(zeros, jnp.copy(zeros), nowhere, zeros.astype(bool))
