"""The state of a draft model: its cache, and the nodes of a tree that it has run after it."""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.places import fitted
from stree_jax.decoding.prefill import prefill, prefill_rest
from stree_jax.decoding.types import Context, DraftTree, Verdict
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import on_mesh
from stree_jax.models.cache import (
    Cache,
    Path,
    Pending,
    cache_specs,
    empty_path,
    init_pending,
    path_to,
    pending_specs,
)
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, first_nodes


@runtime_checkable
class NodeReader(Protocol):
    """The state of a draft model, a NamedTuple of arrays: it gives logits at nodes of a tree.

    `Reader` is that of a `HybridLM`; a draft model of another kind opens its own, see `DraftModel`.
    In a step: `read` once or several times, then `rest`; `close` when the target has verified.
    """

    pending: Any  # what `read` keeps of the nodes; axis 1 of its arrays are the nodes

    @property
    def num_before(self) -> int:
        """Nodes of its own tree before the root."""
        ...

    @property
    def ready(self) -> Bool[Array, " B"] | None:
        """Rows that can draft; None: all of them."""
        ...

    @property
    def replays(self) -> bool:
        """Whether `close` needs the tree that was read, and the place of each node in it."""
        ...

    def read(
        self,
        model: Any,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: np.ndarray | Int[Array, " Q"],
        num_logits: int | None = None,
    ) -> tuple[Float32[Array, "B Z V"], Any]:
        """See `Reader.read`."""
        ...

    def rest(self) -> Any:
        """The state after the last `read` of a step, without what no later step needs."""
        ...

    def close(
        self,
        tree: Tree | None,
        place: Int[Array, "B N"] | None,
        draft: DraftTree,
        verdict: Verdict,
        model: Any = None,
        hidden: Float[Array, "B N M"] | None = None,
    ) -> Any:
        """The state after the accepted path, see `Reader.close`.

        `model` is the draft model, and `hidden` the target's states, see `Drafter.commit`.
        """
        ...


@runtime_checkable
class DraftModel(Protocol):
    """A draft model other than a `HybridLM`: heads on the target's hidden states.

    It is a pytree, such as a `flax.nnx.Module`. Its `config` is that of the target.
    """

    config: ModelConfig

    def open(self, context: Context, num_nodes: int, max_length: int) -> Any:
        """The `NodeReader` before the first step, see `Reader.open`."""
        ...

    def hear(
        self,
        reader: Any,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T M"],
        lengths: Int[Array, " B"],
    ) -> Any:
        """The reader after tokens that the target has prefilled, see `Drafter.read`."""
        ...

    def check_target(self, target: HybridLM) -> None:
        """Refuses another target.

        Raises:
            ValueError: the heads are not of this target.
        """
        ...


def open_reader(
    model: HybridLM | DraftModel, context: Context, num_nodes: int, max_length: int
) -> Any:
    """The state of a draft model of any kind before the first step, see `Reader.open`."""
    if isinstance(model, DraftModel):
        return model.open(context, num_nodes, max_length)
    return Reader.open(model, context, num_nodes, max_length)


def resumed_reader(
    model: HybridLM | DraftModel,
    reader: Any,
    context: Context,
    read: Int[Array, " B"],
    num_nodes: int,
    max_length: int,
) -> Any:
    """The state of a draft model of any kind for longer texts, see `Reader.resume`.

    Heads read nothing here: they hear what the target reads.
    """
    if isinstance(model, DraftModel):
        return fitted(reader, jax.eval_shape(lambda: model.open(context, num_nodes, max_length)))
    return reader.resume(model, context, read, num_nodes, max_length)


class Reader(NamedTuple):
    """The state of a draft model: its cache, and the nodes that it has run after it.

    A draft model does not run all nodes of a draft tree: never the leaves. What is accepted beyond
    the nodes that it ran are *catch-up* tokens, which run with the next root. So the model's own
    tree is C slots for catch-up tokens, filled from the end, and below them the nodes that the
    drafter reads, whose tree the drafter keeps.

    It is a `NodeReader`. In a step: `read` once or several times, each time the next nodes; then
    `close`. No method changes the object. The model is an argument, so that the state has no
    weights.
    """

    cache: Cache
    pending: Pending  # record of the own tree
    path: Path  # accepted in the own tree, replayed by the first `read` of the next step
    catch_up: Int[Array, "B C"]
    has_catch_up: Bool[Array, "B C"]

    @classmethod
    def open(
        cls,
        model: HybridLM,
        context: Context,
        num_nodes: int,
        max_length: int,
        num_catch_up: int = 1,
    ) -> "Reader":
        """Prefills the texts but for the last token of each.

        Args:
            model: the draft model.
            context: the texts.
            num_nodes: nodes that the drafter reads in a step.
            max_length: most tokens of a row.
            num_catch_up: C, the most accepted tokens of a step that the model has not run.
        """
        cache = prefill(model, context.tokens, context.length - 1, max_length)
        return cls._behind(model, cache, len(context.length), num_nodes, num_catch_up)

    @classmethod
    def _behind(
        cls, model: HybridLM, cache: Cache, batch: int, num_nodes: int, num_catch_up: int
    ) -> "Reader":
        """The state of a model that has read all tokens but the last."""
        return cls(
            cache, *_no_nodes(model.config, model.activation_dtype, batch, num_nodes, num_catch_up)
        )

    def resume(
        self,
        model: HybridLM,
        context: Context,
        read: Int[Array, " B"],
        num_nodes: int,
        max_length: int,
        num_catch_up: int = 1,
    ) -> "Reader":
        """The state for longer texts, of which the model reads only what is new.

        Args:
            model: the draft model.
            context: the texts.
            read: tokens of each that this state is for: the last of them was the root.
            num_nodes, max_length, num_catch_up: see `open`; may differ from those of this state.
        """
        cache = self.cache
        if (on_host(self.path.last) >= 0).any():
            cache = _replayed(model, cache, self.pending, self.path)
        num_read = read - 1 - self.has_catch_up.sum(axis=1, dtype=jnp.int32)
        cache = prefill_rest(model, context, num_read, max_length, cache)
        return self._behind(model, cache, len(context.length), num_nodes, num_catch_up)

    @property
    def num_before(self) -> int:
        """See `NodeReader`."""
        return self.catch_up.shape[1]

    @property
    def ready(self) -> None:
        """See `NodeReader`."""
        return None

    @property
    def replays(self) -> bool:
        """See `NodeReader`."""
        return True

    def rest(self) -> "Reader":
        """See `NodeReader`: the next step replays a path of the record."""
        return self

    def read(
        self,
        model: HybridLM,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: np.ndarray | Int[Array, " Q"],
        num_logits: int | None = None,
    ) -> tuple[Float32[Array, "B Z V"], "Reader"]:
        """Runs the next nodes of a tree.

        Args:
            model: the model given to `open`.
            tokens: the tokens of `nodes`.
            tree: the tree that the drafter reads, or a part with these nodes and all before them.
            nodes: consecutive nodes. A NumPy array is static: then nodes are appended to those read
                before, and those from node 0 on begin a step. A traced array is for loops: the
                nodes are of one level, `pending` has room for the whole tree, and nodes that the
                tree does not have are padding.
            num_logits: logits of the last Z queries only; None: of all.

        Returns:
            Logits of the target's tokens, and the state for the next `read`.
        """
        own, num_before = below_catch_up(tree, self.has_catch_up), self.num_before
        num_logits = tokens.shape[1] if num_logits is None else num_logits
        begins = isinstance(nodes, np.ndarray) and nodes[0] == 0
        logits, record, cache = model.tree_forward(
            jnp.concatenate([self.catch_up, tokens], axis=1) if begins else tokens,
            nodes_so_far(own, num_before + nodes),
            self.cache,
            replay=(self.pending, self.path) if begins else None,
            prefix_pending=None if begins else self.pending,
            num_logits=num_logits,
        )
        pending = recorded(self.pending, record, num_before + nodes)
        state = self._replace(cache=cache, pending=pending)
        return model.without_padding(logits), state

    def close(
        self,
        tree: Tree,
        place: Int[Array, "B N"],
        draft: DraftTree,
        verdict: Verdict,
        model: Any = None,
        hidden: Float[Array, "B N M"] | None = None,
    ) -> "Reader":
        """The state after the accepted path, which the next step replays.

        A row that has ended keeps its catch-up tokens: its text may be continued.

        Args:
            tree: the tree that was read.
            place: index in it of each node of the draft tree; -1 for nodes that were not read.
                Deeper nodes of a path have higher indices.
            draft: the draft tree.
            verdict: see `Drafter.commit`.
            model, hidden: for other readers.
        """
        ended, last = verdict.last < 0, jnp.maximum(verdict.last, 0)
        on_path = jnp.take_along_axis(draft.tree.ancestor_mask, last[:, None, None], axis=1)
        read = jnp.where(on_path[:, 0], place, -1).max(axis=1)
        num_slots = self.catch_up.shape[1]
        depth = verdict.num_accepted[:, None] - np.arange(num_slots)[::-1]
        is_at = on_path & (draft.tree.depth[:, None] == depth[..., None])
        nodes = jnp.argmax(is_at, axis=-1)  # the root, which is always read, where there is none
        unread = jnp.take_along_axis(place, nodes, axis=1) < 0
        return self._replace(
            path=path_to(
                below_catch_up(tree, self.has_catch_up), jnp.where(ended, -1, num_slots + read)
            ),
            catch_up=jnp.where(
                ended[:, None], self.catch_up, jnp.take_along_axis(draft.tokens, nodes, axis=1)
            ),
            has_catch_up=jnp.where(ended[:, None], self.has_catch_up, unread),
        )


# One program: a call for each of these arrays takes longer than a short text.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _no_nodes(
    config: ModelConfig, dtype: DTypeLike, batch: int, num_nodes: int, num_catch_up: int
) -> tuple[Pending, Path, Array, Array]:
    """What a `Reader` has beside its cache when nothing is to be replayed."""
    num_nodes += num_catch_up
    slots = jnp.zeros((batch, num_catch_up), jnp.int32)
    pending = init_pending(config, batch, num_nodes, dtype)
    return pending, empty_path(batch, num_nodes), slots, slots.astype(bool)


def _replay_specs(model: HybridLM) -> Any:
    assert model.partition is not None
    axis = model.partition.axis
    specs = cache_specs(model.config, axis)
    return (specs, pending_specs(model.config, axis), ROWS), specs


@jax.jit
@on_mesh(_replay_specs, modules=1)
def _replayed(model: HybridLM, cache: Cache, pending: Pending, path: Path) -> Cache:
    return model.replay(cache, pending, path)


def below_catch_up(tree: Tree, has_catch_up: Bool[Array, "B C"]) -> Tree:
    """The tree below a chain of catch-up tokens, of which some at the start may be missing."""
    batch, num_slots = has_catch_up.shape
    slots = np.arange(num_slots)
    count = has_catch_up.sum(axis=1, dtype=jnp.int32)[:, None]
    above = jnp.pad(has_catch_up[:, :-1], ((0, 0), (1, 0)))
    order = jnp.maximum(jnp.cumsum(has_catch_up, axis=1, dtype=jnp.int32) - 1, 0)
    root_parent = jnp.where(has_catch_up[:, -1:], num_slots - 1, -1)
    upper = jnp.asarray(slots <= slots[:, None]) & has_catch_up[:, None, :]
    num_nodes = tree.parents.shape[1]
    nothing = jnp.zeros((batch, num_slots, num_nodes), bool)
    caught_up = jnp.broadcast_to(has_catch_up[:, None], (batch, num_nodes, num_slots))
    return Tree(
        parents=jnp.concatenate(
            [
                jnp.where(above, slots - 1, -1),
                jnp.where(tree.parents < 0, root_parent, num_slots + tree.parents),
            ],
            axis=1,
        ),
        depth=jnp.concatenate([order, count + tree.depth], axis=1),
        ancestor_mask=jnp.concatenate(
            [
                jnp.concatenate([upper, nothing], axis=2),
                jnp.concatenate([caught_up, tree.ancestor_mask], axis=2),
            ],
            axis=1,
        ),
        valid=jnp.concatenate([has_catch_up, tree.valid], axis=1),
    )


def nodes_so_far(tree: Tree, nodes: np.ndarray | Int[Array, " Q"]) -> Tree:
    """The tree that the last `nodes` are the queries of, see `Reader.read`."""
    if isinstance(nodes, np.ndarray):
        return first_nodes(tree, int(nodes[-1]) + 1)
    return _level_behind(tree, nodes)


def recorded(pending: Any, record: Any, nodes: np.ndarray | Int[Array, " Q"]) -> Any:
    """The records of all nodes so far, after a call that appended those of `nodes`."""
    if isinstance(nodes, np.ndarray):
        return record

    def put(slots: Array, read: Array) -> Array:
        return slots.at[:, nodes].set(read[:, slots.shape[1] :], mode="drop")

    return jax.tree.map(put, pending, record)


def _level_behind(tree: Tree, queries: Int[Array, " Q"]) -> Tree:
    """The ancestors of `queries` in N fixed slots, then the query nodes.

    Args:
        tree: the own tree; nodes below `queries` are ignored.
        queries: consecutive nodes of one level; indices outside the tree are padding.
    """
    num_nodes = tree.parents.shape[1]
    above = jnp.arange(num_nodes) < queries[0]
    at = jnp.minimum(queries, num_nodes - 1)
    valid: Bool[Array, "B Q"] = tree.valid[:, at] & (queries < num_nodes)
    mask = jnp.concatenate([tree.ancestor_mask, tree.ancestor_mask[:, at]], axis=1) & above
    itself = jnp.eye(len(queries), dtype=bool) & valid[:, None, :]
    itself = jnp.pad(itself, ((0, 0), (num_nodes, 0), (0, 0)))
    return Tree(
        parents=jnp.concatenate([tree.parents, tree.parents[:, at]], axis=1),
        depth=jnp.concatenate([tree.depth, tree.depth[:, at]], axis=1),
        ancestor_mask=jnp.concatenate([mask, itself], axis=2),
        valid=jnp.concatenate([tree.valid & above, valid], axis=1),
    )
