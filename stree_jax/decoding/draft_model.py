"""Draft models: their base, and a whole model as one, with the nodes that it has run."""

import abc
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.prefix.prefill import prefill
from stree_jax.decoding.types import DraftTree, Verdict
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import on_mesh
from stree_jax.models.cache import (
    Cache,
    Path,
    Pending,
    cache_specs,
    empty_path,
    init_cache,
    init_pending,
    path_to,
    pending_specs,
    replayed,
)
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM, check_model
from stree_jax.tree import KnownNodes, LevelNodes, Tree, below_chain


class DraftModel(nnx.Module):
    """The model that drafters of trees run: `WholeModel`, or a head on the target's hidden states.

    Its verbs are those of a `Drafter`. Its state is a NamedTuple of arrays, whose field `pending`
    has what `run` keeps of the nodes: axis 1 of its arrays are the nodes. No verb changes the state
    that it gets.

    In a step: `run` for the root and then for each level, then `finish_step`; `commit` when the
    target has verified.

    Attributes:
        config: vocabulary and width are the target's.
        inner_layers: which hidden states of the target it needs, see `Drafter`.
        max_depth: most drafts on a path; None: any number.
        outputs_ahead: a method for `tune`, see `HeadModel`; None: it reads tokens alone.
    """

    config: ModelConfig
    inner_layers: tuple[int, ...] | None = ()
    max_depth: int | None = None
    outputs_ahead: Any = None

    def check_target(self, target: HybridLM) -> None:
        """Refuses a target that this is not a draft model of; it has the vocabulary.

        Raises:
            ValueError: heads of another model.
        """

    @abc.abstractmethod
    def init(self, batch: int, num_nodes: int, max_length: int) -> Any:
        """The state before the first token of a text.

        Args:
            batch: number of rows.
            num_nodes: nodes that the drafter runs in a step.
            max_length: most tokens of a row.
        """

    @abc.abstractmethod
    def read(
        self, state: Any, tokens: Int[Array, "B T"], hidden: Any, lengths: Int[Array, " B"]
    ) -> Any:
        """The state after the next tokens of a text, see `Drafter.read`."""

    def ready(self, state: Any) -> Bool[Array, " B"] | None:
        """Rows that can draft; None: all of them."""
        return None

    @abc.abstractmethod
    def run(
        self,
        state: Any,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: KnownNodes | LevelNodes,
    ) -> tuple[Float32[Array, "B Q V"], Any]:
        """Runs the next nodes of a tree.

        Args:
            state: the state.
            tokens: the tokens of `nodes`.
            tree: the tree that the drafter runs, or a part with these nodes and all before them.
            nodes: which nodes: `KnownNodes(0, 1)`, the root, begins a step. `LevelNodes` come from
                a loop over levels, where `pending` has room for the whole tree.

        Returns:
            Logits of the target's tokens, and the state for the next `run`.
        """

    def log_confidence(
        self, state: Any, tokens: Array, tree: Tree, nodes: KnownNodes | LevelNodes
    ) -> Float32[Array, "B Q"] | float:
        """Log of the chance, beside its logits, that a model's draft after each node is right.

        Searches add it to the scores of the nodes below. `state` is what the `run` with the other
        arguments returned. 0: the logits say all.
        """
        return 0.0

    def finish_step(self, state: Any) -> Any:
        """The state after the last `run` of a step, without what no later step needs."""
        return state

    @abc.abstractmethod
    def commit(
        self,
        state: Any,
        tree: Tree,
        place: Int[Array, "B N"],
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N _"],
    ) -> Any:
        """The state after the accepted path. A row that has ended keeps what its text needs.

        Args:
            state: the state.
            tree: the tree that was run.
            place: index in it of each node of the draft tree; -1 for nodes that were not run.
                Deeper nodes of a path have higher indices.
            draft, verdict, hidden: see `Drafter.commit`.
        """


class WholeModelState(NamedTuple):
    """The state of a `WholeModel`: its cache, and the nodes that it has run after it."""

    cache: Cache
    pending: Pending  # record of the own tree
    path: Path  # accepted in the own tree, replayed by the first `run` of the next step
    catch_up: Int[Array, "B C"]
    has_catch_up: Bool[Array, "B C"]


class WholeModel(DraftModel):
    """A `HybridLM` as a draft model.

    It does not run all nodes of a draft tree: never the leaves. What is accepted beyond the nodes
    that it ran are *catch-up* tokens, `num_catch_up` at most, which run with the next root. So the
    model's own tree is C slots for catch-up tokens, filled from the end, and below them the nodes
    that the drafter runs, whose tree the drafter keeps.
    """

    inner_layers = None  # it reads tokens alone

    def __init__(self, model: HybridLM | Any, num_catch_up: int = 1):
        check_model(model)
        self.model = model
        self.num_catch_up = num_catch_up

    @property
    def config(self) -> ModelConfig:  # type: ignore[override]
        """The model's."""
        return self.model.config

    def init(self, batch: int, num_nodes: int, max_length: int) -> WholeModelState:
        sizes = batch, num_nodes + self.num_catch_up, max_length, self.num_catch_up
        return _no_text(self.config, self.model.activation_dtype, sizes)

    def read(
        self, state: WholeModelState, tokens: Array, hidden: Any, lengths: Array
    ) -> WholeModelState:
        """See `DraftModel`. A row with catch-up tokens reads these first, and keeps as many."""
        cache, path = state.cache, state.path
        if _may_reach(path.last, 0):
            cache = _replayed(self.model, cache, state.pending, path)
            path = replayed(path)
        if not _may_reach(lengths, 1):
            return state._replace(cache=cache, path=path)
        slots = state.catch_up, state.has_catch_up
        cache, catch_up = _after_text(self.model, *slots, tokens, lengths, cache)
        return state._replace(cache=cache, path=path, catch_up=catch_up)

    def run(
        self,
        state: WholeModelState,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: KnownNodes | LevelNodes,
        num_logits: int | None = None,
    ) -> tuple[Float32[Array, "B Z V"], WholeModelState]:
        """See `DraftModel`; known nodes after the root are appended to those run before.

        `num_logits`: logits of the last Z queries only; None: of all.
        """
        with_catch_up = below_chain(state.has_catch_up, tree)
        queries = nodes.shifted(self.num_catch_up)
        num_logits = tokens.shape[1] if num_logits is None else num_logits
        begins = isinstance(nodes, KnownNodes) and nodes.first == 0
        logits, record, cache = self.model.tree_forward(
            jnp.concatenate([state.catch_up, tokens], axis=1) if begins else tokens,
            queries.with_ancestors(with_catch_up),
            state.cache,
            replay=(state.pending, state.path) if begins else None,
            prefix_pending=None if begins else state.pending,
            num_logits=num_logits,
        )
        pending = queries.recorded(state.pending, record)
        return self.model.without_padding(logits), state._replace(cache=cache, pending=pending)

    def commit(
        self,
        state: WholeModelState,
        tree: Tree,
        place: Int[Array, "B N"],
        draft: DraftTree,
        verdict: Verdict,
        hidden: object = None,
    ) -> WholeModelState:
        """See `DraftModel`: the next step replays the path. A row that ended keeps its slots."""
        ended, last = verdict.last < 0, jnp.maximum(verdict.last, 0)
        on_path = draft.tree.on_path(last)
        read = jnp.where(on_path, place, -1).max(axis=1)
        depth = (
            verdict.num_accepted[:, None] - np.arange(self.num_catch_up, dtype=np.int32)[None, ::-1]
        )
        # The root, which is always run, where there is no such node.
        nodes = draft.tree.at_depth(on_path, depth)
        unread = jnp.take_along_axis(place, nodes, axis=1) < 0
        with_catch_up = below_chain(state.has_catch_up, tree)
        return state._replace(
            path=path_to(with_catch_up, jnp.where(ended, -1, self.num_catch_up + read)),
            catch_up=jnp.where(
                ended[:, None], state.catch_up, jnp.take_along_axis(draft.tokens, nodes, axis=1)
            ),
            has_catch_up=jnp.where(ended[:, None], state.has_catch_up, unread),
        )


def draft_model(model: Any) -> Any:
    """Returns a user's model as a `DraftModel`: heads are one, a `HybridLM` is wrapped."""
    if isinstance(model, HybridLM):
        return WholeModel(model)
    if not isinstance(model, DraftModel):
        raise ValueError(
            f"model must be a HybridLM, got {type(model).__name__}; load one with from_pretrained,"
            " or derive the class of a head from stree_jax.decoding.DraftModel"
        )
    return model


# One program: a call for each of these arrays takes longer than a short text.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _no_text(
    config: ModelConfig, dtype: DTypeLike, sizes: tuple[int, int, int, int]
) -> WholeModelState:
    batch, num_nodes, max_length, num_catch_up = sizes
    slots = jnp.zeros((batch, num_catch_up), jnp.int32)
    pending = init_pending(config, batch, num_nodes, dtype)
    cache = init_cache(config, batch, max_length, dtype)
    return WholeModelState(cache, pending, empty_path(batch, num_nodes), slots, slots.astype(bool))


def _may_reach(values: Int[Array, " B"], least: int) -> bool:
    """True if a row has `least` or more; True under tracing, where values are unknown."""
    return isinstance(values, jax.core.Tracer) or bool((on_host(values) >= least).any())


@jax.jit
def _after_text(
    model: HybridLM,
    catch_up: Int[Array, "B C"],
    has_catch_up: Bool[Array, "B C"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    cache: Cache,
) -> tuple[Cache, Int[Array, "B C"]]:
    """The cache after the first `lengths` tokens of both, and the last ones of both."""
    both = jnp.concatenate([catch_up, tokens], axis=1)
    num_slots = catch_up.shape[1]
    first = num_slots - has_catch_up.sum(axis=1, dtype=jnp.int32)

    def part(starts: Array, size: int) -> Array:
        return jax.vmap(lambda row, at: lax.dynamic_slice(row, (at,), (size,)))(both, starts)

    text = part(first, tokens.shape[1])
    return prefill(model, text, lengths, cache=cache), part(lengths, num_slots)


def _replay_specs(model: HybridLM) -> Any:
    axis = model.partition.axis
    specs = cache_specs(model.config, axis)
    return (specs, pending_specs(model.config, axis), ROWS), specs


@jax.jit
@on_mesh(_replay_specs, modules=1)
def _replayed(model: HybridLM, cache: Cache, pending: Pending, path: Path) -> Cache:
    return model.replay(cache, pending, path)
