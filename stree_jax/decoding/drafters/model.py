"""Drafting with a small model: a static tree, level by level, from one state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.decoding.drafters.base import root_token
from stree_jax.decoding.drafters.children import (
    check_child_sampling,
    chosen_child_sampling,
    draw,
    shared_scores,
)
from stree_jax.decoding.drafters.levels import grow_levels, levels_of
from stree_jax.decoding.nodes import put, take
from stree_jax.decoding.reader import DraftModel, draft_model
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import DraftTree, Drawn, Step, Verdict
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology


class ModelDraftState(NamedTuple):
    """A draft model's state between steps.

    Attributes:
        reader: the state of the `DraftModel`.
        read: the tree that it has run, if it chose the shape itself; otherwise None.
        place: index in it of each node of the draft tree; -1 for nodes that the model did not run.
    """

    reader: Any
    read: Tree | None = None
    place: Int[Array, "B N"] | None = None


class RunsModel(nnx.Module):
    """The base of drafters of trees with a draft model.

    Args:
        model: the draft model.

    Raises:
        ValueError: `model` is not a model.
    """

    def __init__(self, model: HybridLM | DraftModel):
        self.draft_model = draft_model(model)

    @property
    def model(self) -> Any:
        """The model, or the head, that it was made with."""
        return self.draft_model.given

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        self.draft_model.check_target(target)

    @property
    def inner_layers(self) -> tuple[int, ...] | None:
        """See `Drafter`: what the draft model needs."""
        return self.draft_model.inner_layers

    def num_read(self, topology: TreeTopology) -> int:
        """Nodes that the model runs in a step."""
        raise NotImplementedError

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> ModelDraftState:
        return ModelDraftState(self.draft_model.init(batch, self.num_read(topology), max_length))

    def read(
        self,
        state: ModelDraftState,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T _"] | None,
        lengths: Int[Array, " B"],
    ) -> ModelDraftState:
        return state._replace(reader=self.draft_model.read(state.reader, tokens, hidden, lengths))


class ModelDrafter(RunsModel):
    """A draft model that fills a static tree level by level, from one state.

    Args:
        model: any model with the target's vocabulary, or heads such as `MtpModel`.
        child_sampling: choice of siblings: "top_k" (the most probable), "shared" (the most
            probable after adding the noise that the target draws its tokens with), "iid" (sampled
            independently), "without_replacement" (sampled, all different, in the order drawn), or
            "auto": top-k at temperature 0, shared above it. Verifiers that test drafts by their
            probabilities need "iid" or "without_replacement".

    Raises:
        ValueError: another value of `child_sampling`, or `model` is not a model.
    """

    def __init__(self, model: HybridLM | DraftModel, *, child_sampling: str = "auto"):
        check_child_sampling(child_sampling)
        super().__init__(model)
        self._child_sampling = child_sampling

    def default_topology(self) -> TreeTopology:
        """The 13-node tree of the paper's main experiment."""
        return TreeTopology.paper("A")

    def child_sampling(self, topology: TreeTopology, *, temperature_is_zero: bool) -> Drawn:
        how = chosen_child_sampling(self._child_sampling, temperature_is_zero=temperature_is_zero)
        return Drawn(how)

    def num_read(self, topology: TreeTopology) -> int:
        """See `RunsModel`: all but the leaves."""
        return len(_inner_nodes(topology))

    def propose(
        self, state: ModelDraftState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, ModelDraftState]:
        drawn_how = self.child_sampling(
            topology, temperature_is_zero=step.sampling.temperature_is_zero
        )
        how = drawn_how.kind
        inner = np.array(_inner_nodes(topology))
        root, num_nodes = root_token(step.context), topology.num_nodes

        def grow(so_far: _Grown, at: _At, width: int) -> tuple[_Grown, Array | None]:
            """A level's children, and the distributions that they were drawn from."""
            logits, reader = self.draft_model.run(
                so_far.reader,
                so_far.tokens[:, at.nodes],
                _inner_tree(topology, so_far.valid[:, inner]),
                at.read,
            )
            logits = step.processors.masked(logits, take(so_far.states, at.nodes))
            log_probs = None
            if how == "shared":
                logits = shared_scores(logits, step, at.depth)
            elif how != "top_k":
                logits = log_probs = token_log_probs(logits, step.sampling)
            keys = jax.vmap(jax.random.fold_in, (0, None))(step.keys, at.depth)
            drawn, exists = draw(how, logits, width, keys)
            valid = exists[:, at.source, at.rank] & so_far.valid[:, at.parents]
            tokens = drawn[:, at.source, at.rank]
            return (
                _Grown(
                    put(so_far.tokens, at.children, tokens),
                    put(so_far.valid, at.children, valid),
                    step.processors.grown(so_far.states, at.children, at.parents, tokens),
                    reader,
                    so_far.finite & exists[..., 0].all(axis=-1),
                ),
                log_probs,
            )

        levels, first, at = levels_of(topology), 0, []
        for depth, level in enumerate(levels):
            read = list(range(first, first + len(level.inner)))
            parts = (level.children, level.parents, level.source, level.rank)
            at.append(_At(depth, level.inner, read, *parts))
            first += len(level.inner)
        rest = ((0, 0), (0, num_nodes - 1))
        grown, log_probs = grow_levels(
            grow,
            _Grown(
                jnp.pad(root, rest),
                jnp.pad(jnp.ones_like(root, bool), rest),
                step.processors.room(num_nodes),
                state.reader,
                jnp.ones(len(root), bool),
            ),
            at,
            _At(0, None, len(inner), num_nodes, None, None, None),
            [level.width for level in levels],
            self.draft_model.num_before(state.reader) + len(inner),
        )
        rows = np.full(num_nodes, -1, np.int32)
        if log_probs[0] is not None:
            first, depth = 0, 0
            for group in log_probs:
                for _ in range(group.shape[0]):
                    rows[levels[depth].inner] = first + np.arange(len(levels[depth].inner))
                    first, depth = first + group.shape[2], depth + 1
        draft = DraftTree(
            tokens=grown.tokens,
            tree=topology.tree(drafted(self.draft_model.ready(state.reader), grown.valid)),
            log_probs=None if log_probs[0] is None else _concatenated(log_probs),
            log_prob_row=jnp.asarray(rows),
            finite=grown.finite,
            drawn=drawn_how,
        )
        return draft, state._replace(reader=self.draft_model.rest(grown.reader))

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> ModelDraftState:
        inner = np.array(_inner_nodes(topology))
        place = np.full(topology.num_nodes, -1, np.int32)
        place[inner] = np.arange(len(inner))
        tree = _inner_tree(topology, draft.tree.valid[:, inner])
        places = jnp.broadcast_to(place, draft.tokens.shape)
        reader = self.draft_model.commit(state.reader, tree, places, draft, verdict, hidden)
        return state._replace(reader=reader)


def drafted(ready: Bool[Array, " B"] | None, valid: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """The valid nodes, of rows that are not ready the root alone."""
    if ready is None:
        return valid
    return valid & (ready[:, None] | (jnp.arange(valid.shape[1]) == 0))


class _Grown(NamedTuple):
    """A draft tree while it grows; nodes below those grown so far are not valid."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    states: Any  # of the logits processors
    reader: Any
    finite: Bool[Array, " B"]


class _At(NamedTuple):
    """A level: its nodes with children, and the nodes of the next level, see `Level`."""

    depth: Any
    nodes: Any
    read: Any  # their indices among the nodes that the model runs
    children: Any
    parents: Any
    source: Any
    rank: Any


def _inner_nodes(topology: TreeTopology) -> tuple[int, ...]:
    """Nodes with children, in level order: the model runs these."""
    return tuple(node for node, children in enumerate(topology.children) if children)


def _inner_tree(topology: TreeTopology, valid: Bool[Array, "B inner"]) -> Tree:
    """The tree of the nodes with children."""
    inner = _inner_nodes(topology)
    position = {node: at for at, node in enumerate(inner)}
    parents = (-1, *(position[topology.parents[node]] for node in inner[1:]))
    return TreeTopology(parents).tree(valid)


def _concatenated(groups: list[Array]) -> Array:
    """Rows `[B, Z, V]` of all levels, from groups `[levels, B, rows, V]`."""
    rows = [jnp.moveaxis(group, 0, 1) for group in groups]
    return jnp.concatenate([row.reshape(len(row), -1, row.shape[-1]) for row in rows], axis=1)
