"""The state of a draft model: its cache, and the nodes of a tree that it has run behind it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Float32, Int
from stree_jax.decoding.prefill import prefill
from stree_jax.decoding.types import Context, DraftTree, Verdict
from stree_jax.models.cache import Cache, Path, Pending, empty_path, path_to
from stree_jax.models.lm import HybridLM
from stree_jax.tree import Tree, first_nodes


class Reader(NamedTuple):
    """The state of a draft model: its cache, and the nodes that it has run behind it.

    A draft model does not run all nodes of a draft tree: never the leaves. What is accepted beyond
    the nodes that it ran are *catch-up* tokens, which run with the next root. So the model's own
    tree is C slots for catch-up tokens, filled from the end, and below them the nodes that the
    drafter reads, whose tree the drafter keeps.

    In a step: `read` once or several times, each time the next nodes; then `close`. No method
    changes the object. The model is an argument, so that the state has no weights.
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
        batch = context.length.shape[0]
        return cls(
            cache=prefill(model, context.tokens, context.length - 1, max_length),
            pending=model.init_pending(batch, num_catch_up + num_nodes),
            path=empty_path(batch, num_catch_up + num_nodes),
            catch_up=jnp.zeros((batch, num_catch_up), jnp.int32),
            has_catch_up=jnp.zeros((batch, num_catch_up), bool),
        )

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
            Logits without vocabulary padding, and the state for the next `read`.
        """
        own, before = below_catch_up(tree, self.has_catch_up), self.catch_up.shape[1]
        num_logits = tokens.shape[1] if num_logits is None else num_logits
        if isinstance(nodes, np.ndarray):
            begins = nodes[0] == 0
            logits, pending, cache = model.tree_forward(
                jnp.concatenate([self.catch_up, tokens], axis=1) if begins else tokens,
                first_nodes(own, before + int(nodes[-1]) + 1),
                self.cache,
                replay=(self.pending, self.path) if begins else None,
                prefix_pending=None if begins else self.pending,
                num_logits=num_logits,
            )
            state = self._replace(cache=cache, pending=pending)
        else:
            nodes = before + nodes
            logits, record, _ = model.tree_forward(
                tokens,
                _level_behind(own, nodes),
                self.cache,
                prefix_pending=self.pending,
                num_logits=num_logits,
            )

            def put(slots: Array, read: Array) -> Array:
                return slots.at[:, nodes].set(read[:, slots.shape[1] :], mode="drop")

            state = self._replace(pending=jax.tree.map(put, self.pending, record))
        return logits[..., : model.config.vocab_size], state

    def close(
        self, tree: Tree, place: Int[Array, "B N"], draft: DraftTree, verdict: Verdict
    ) -> "Reader":
        """The state after the accepted path, which the next step replays.

        Args:
            tree: the tree that was read.
            place: index in it of each node of the draft tree; -1 for nodes that were not read.
                Deeper nodes of a path have higher indices.
            draft: the draft tree.
            verdict: see `Drafter.commit`.
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
            catch_up=jnp.take_along_axis(draft.tokens, nodes, axis=1),
            has_catch_up=unread & ~ended[:, None],
        )


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
