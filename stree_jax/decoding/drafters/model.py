"""Drafting with a small model: a static tree, level by level, from one state."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.decoding.draft_model import DraftModel, WholeModel, draft_model
from stree_jax.decoding.drafters.base import Drafter, root_token
from stree_jax.decoding.drafters.children import check_child_sampling, drawn_children
from stree_jax.decoding.drafters.levels import Level, grow_levels, levels_of
from stree_jax.decoding.types import DraftTree, Step, Verdict
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, TreeTopology, put, take


class ModelDraftState(NamedTuple):
    """A draft model's state between steps."""

    model_state: Any  # the state of the `DraftModel`
    read: Tree | None = None  # that it has run, if it chose the shape itself
    place: Int[Array, "B N"] | None = None  # in it of each draft node; -1: the model did not run it


class RunsModel(Drafter):
    """The base of drafters of trees with a draft model."""

    def __init__(self, model: HybridLM | DraftModel | Any):
        # Once: what the host asks it for, it asks in every call.
        self.draft_model = draft_model(model)
        self.inner_layers = self.draft_model.inner_layers

    @property
    def model(self) -> Any:
        """The model that it was made with."""
        model = self.draft_model
        return model.model if isinstance(model, WholeModel) else model

    def check(self, target: HybridLM, topology: TreeTopology, *, temperature_is_zero: bool) -> None:
        self.draft_model.check_target(target)
        most = self.draft_model.max_depth
        if most is not None and topology.depth > most:
            raise ValueError(
                f"a tree of depth {topology.depth} is too deep for {type(self.model).__name__},"
                f" which drafts {most} tokens on a path"
            )

    @abc.abstractmethod
    def num_read(self, topology: TreeTopology) -> int:
        """Nodes that the model runs in a step."""

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> ModelDraftState:
        return ModelDraftState(self.draft_model.init(batch, self.num_read(topology), max_length))

    def read(
        self, state: ModelDraftState, tokens: Array, hidden: Any, lengths: Array
    ) -> ModelDraftState:
        return state._replace(
            model_state=self.draft_model.read(state.model_state, tokens, hidden, lengths)
        )

    @abc.abstractmethod
    def draft_tree(self, model_state: Any, step: Step, topology: TreeTopology) -> tuple[Any, ...]:
        """The draft trees, the draft model's state, and more fields of `ModelDraftState`."""

    @abc.abstractmethod
    def own_tree(
        self, state: ModelDraftState, draft: DraftTree, topology: TreeTopology
    ) -> tuple[Any, Any]:
        """The tree that the model has run, and the `place` in it of each node of the draft tree."""

    def propose(
        self, state: ModelDraftState, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, ModelDraftState]:
        """See `Drafter`. A row that is not ready has its root alone."""
        draft, model_state, *place = self.draft_tree(state.model_state, step, topology)
        ready = self.draft_model.ready(state.model_state)
        if ready is not None:
            tree, is_root = draft.tree, np.arange(topology.num_nodes)[None] == 0
            valid = tree.valid & (ready[:, None] | is_root)
            mask = tree.ancestor_mask & valid[:, None, :]
            draft = draft._replace(tree=tree._replace(valid=valid, ancestor_mask=mask))
        return draft, ModelDraftState(self.draft_model.finish_step(model_state), *place)

    def commit(
        self,
        state: ModelDraftState,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N M"],
        topology: TreeTopology,
    ) -> ModelDraftState:
        tree, place = self.own_tree(state, draft, topology)
        model_state = self.draft_model.commit(
            state.model_state, tree, place, draft, verdict, hidden
        )
        return state._replace(model_state=model_state)


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

    def __init__(self, model: HybridLM | DraftModel | Any, *, child_sampling: str = "auto"):
        check_child_sampling(child_sampling)
        super().__init__(model)
        self._child_sampling = child_sampling

    def default_topology(self) -> TreeTopology:
        """Returns `TreeTopology.default()`."""
        return TreeTopology.default()

    def num_read(self, topology: TreeTopology) -> int:
        return len(_inner_nodes(topology))

    def draft_tree(
        self, model_state: Any, step: Step, topology: TreeTopology
    ) -> tuple[DraftTree, Any]:
        is_zero = step.sampling.temperature_is_zero
        drawn = self.child_sampling(topology, temperature_is_zero=is_zero)
        inner = _inner_nodes(topology)
        root, num_nodes = root_token(step.context), topology.num_nodes

        def grow(so_far: PartialTree, at: Level, width: int) -> tuple[PartialTree, Array | None]:
            """A level's children, and the distributions that they were drawn from."""
            logits, model_state = self.draft_model.run(
                so_far.model_state,
                so_far.tokens[:, at.nodes],
                _inner_tree(topology, so_far.valid[:, inner]),
                at.read,
            )
            logits = step.processors.masked(logits, take(so_far.states, at.nodes))
            keys = jax.vmap(jax.random.fold_in, (0, None))(step.keys, at.depth)
            below, exists, log_probs = drawn_children(
                drawn.kind, logits, width, step, at.depth, keys
            )
            parents = at.nodes[at.source]
            valid = exists[:, at.source, at.rank] & so_far.valid[:, parents]
            tokens = below[:, at.source, at.rank]
            return (
                PartialTree(
                    put(so_far.tokens, at.children, tokens),
                    put(so_far.valid, at.children, valid),
                    step.processors.grown(so_far.states, at.children, parents, tokens),
                    model_state,
                    so_far.finite & exists[..., 0].all(axis=-1),
                ),
                log_probs,
            )

        levels, below_root = levels_of(topology), ((0, 0), (0, num_nodes - 1))
        tree, log_probs = grow_levels(
            grow,
            PartialTree(
                jnp.pad(root, below_root),
                jnp.pad(jnp.ones_like(root, bool), below_root),
                step.processors.room(num_nodes),
                model_state,
                jnp.ones(len(root), bool),
            ),
            levels,
            [max(level.rank) + 1 for level in levels],
        )
        rows, known = np.full(num_nodes, -1, np.int32), None
        if log_probs[0] is not None:
            sizes = [group.shape[2] for group in log_probs for _ in range(group.shape[0])]
            for level, first in zip(levels, np.cumsum([0, *sizes]), strict=False):
                rows[level.nodes] = first + np.arange(len(level.nodes))
            by_row = [jnp.moveaxis(group, 0, 1) for group in log_probs]  # [B, levels, rows, V]
            by_row = [part.reshape(len(part), -1, part.shape[-1]) for part in by_row]
            known = jnp.concatenate(by_row, axis=1)
        draft = DraftTree(
            tokens=tree.tokens,
            tree=topology.tree(tree.valid),
            log_probs=known,
            log_prob_row=jnp.asarray(rows),
            finite=tree.finite,
            drawn=drawn,
        )
        return draft, tree.model_state

    def own_tree(
        self, state: ModelDraftState, draft: DraftTree, topology: TreeTopology
    ) -> tuple[Tree, Array]:
        inner = _inner_nodes(topology)
        place = np.full(topology.num_nodes, -1, np.int32)
        place[inner] = np.arange(len(inner))
        tree = _inner_tree(topology, draft.tree.valid[:, inner])
        return tree, jnp.broadcast_to(place, draft.tokens.shape)


class HeadDrafter(ModelDrafter):
    """A head on the target's states that fills a static tree, by the draft model that it makes."""

    draft_model_of: type[Any]  # of a target and its head

    def __init__(self, target: HybridLM, head: Any, *, child_sampling: str = "auto"):
        super().__init__(self.draft_model_of(target, head), child_sampling=child_sampling)


class PartialTree(NamedTuple):
    """A draft tree while it grows; nodes below those grown so far are not valid."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    states: Any  # of the logits processors
    model_state: Any
    finite: Bool[Array, " B"]


def _inner_nodes(topology: TreeTopology) -> np.ndarray:
    """Nodes with children, in level order: the model runs these."""
    return np.flatnonzero([bool(children) for children in topology.children])


def _inner_tree(topology: TreeTopology, valid: Bool[Array, "B inner"]) -> Tree:
    """The tree of the nodes with children."""
    inner = _inner_nodes(topology)
    parents = np.searchsorted(inner, np.array(topology.parents)[inner[1:]])
    return TreeTopology((-1, *parents.tolist())).tree(valid)
