"""Logits processors: rules about the next token that depend on the text so far.

A processor has a state for each row. A tree of drafts is several texts at once, so the loop
computes a state for each node, from its parent's state and its token, and processes the target's
logits at every node with that node's state. After a step a row's state is advanced along the
emitted path. So a tree gives the text of autoregressive decoding with the same processors.
"""

import abc
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Bool, Float, Int
from stree_jax.decoding.prompts import Context
from stree_jax.decoding.rules import Rule, classes_of, per_row
from stree_jax.tree import Tree, TreeTopology, put, take


class LogitsProcessor(Rule):
    """A `Rule` whose `__call__` does what `apply` does."""

    def apply(self, logits: Float[Array, "B Q V"], state: Any, /) -> Float[Array, "B Q V"]:
        return self(logits, state)

    @abc.abstractmethod
    def __call__(self, logits: Float[Array, "B Q V"], state: Any = None, /) -> Any:
        """See `Rule.apply`."""


class Processing(NamedTuple):
    """The processors of a step, and the state of each at the root, which is each row's last token.

    Without processors all methods return their arguments, and compute nothing.

    Attributes:
        processors: processors whose numbers have an axis of rows.
        states: the state of each, arrays `[B, ...]`.
    """

    processors: tuple[Any, ...] = ()
    states: tuple[Any, ...] = ()

    @classmethod
    def of(cls, processors: tuple[Any, ...], states: tuple[Any, ...]) -> "Processing":
        """Both, if they belong together."""
        if len(processors) != len(states):
            raise ValueError(
                f"the sampling has {len(processors)} logits processors and the state those of"
                f" {len(states)}; give the same sampling to `start` and `run`"
            )
        return cls(processors, states)

    def __call__(self, logits: Float[Array, "B Q V"], states: Any) -> Float[Array, "B Q V"]:
        """The logits after all processors, in their order, at nodes with these states."""
        for processor, state in zip(self.processors, states, strict=True):
            logits = processor(logits, state)
        return logits

    def advance(self, states: Any, tokens: Int[Array, "B Q"]) -> tuple[Any, ...]:
        """The states of nodes `[B, Q, ...]` after a token each."""
        new_states = []
        for processor, state in zip(self.processors, states, strict=True):
            after = processor.advance(state, tokens)
            before, now = (
                jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", s) for s in (state, after)
            )
            if before != now:
                raise ValueError(
                    f"{type(processor).__name__}.advance must return states as it gets them,"
                    f" {before}, and returned {now}"
                )
            new_states.append(after)
        return tuple(new_states)

    def applied(
        self, logits: Float[Array, "B Q V"], states: Any
    ) -> tuple[Float[Array, "B Q V"], Bool[Array, "B Q"] | None]:
        """The logits after all processors, and at which nodes they allow a token.

        A node where no token is allowed, as after an end token, keeps the logits that it had, so
        that a verifier can compute with them. Without processors all nodes allow some: None.
        """
        if not self.processors:
            return logits, None
        # Else XLA may compute the rules again in each of the passes below. (XLA drops the barrier
        # on a CPU before it fuses: only time depends on it, no bits.)
        processed = lax.optimization_barrier(self(logits, states))
        # As in `best_token`: XLA's maximum ignores NaN on a CPU.
        best = jnp.where(jnp.isnan(processed), jnp.inf, processed).max(axis=-1)
        allows_some = jnp.isfinite(best)
        return jnp.where(allows_some[..., None], processed, logits), allows_some

    def masked(self, logits: Float[Array, "B Q V"], states: Any) -> Float[Array, "B Q V"]:
        """The logits of a draft model after all processors.

        A node where no token is allowed keeps its own. Its drafts are rejected, and no row fails.
        """
        return self.applied(logits, states)[0]

    def room(self, num_nodes: int) -> tuple[Any, ...]:
        """Buffers for the states of a tree that grows, with that of the root."""

        def room(leaf: Array) -> Array:
            empty = jnp.zeros((len(leaf), num_nodes, *leaf.shape[1:]), leaf.dtype)
            return empty.at[:, 0].set(leaf)

        return jax.tree.map(room, self.states)

    def grown(self, states: Any, children: Any, parents: Any, tokens: Int[Array, "B Q"]) -> Any:
        """Writes the states of new nodes into the buffers."""
        below = self.advance(take(states, parents), tokens)
        return jax.tree.map(lambda buffer, new: put(buffer, children, new), states, below)

    def of_tree(self, tokens: Int[Array, "B N"], tree: Tree, topology: TreeTopology) -> Any:
        """The states of all nodes of a draft tree, `[B, N, ...]`.

        Level by level where the tree has the topology's shape. A drafter may choose another, so the
        program looks; for a static tree XLA knows the answer.
        """
        if not self.processors or topology.num_nodes == 1:
            return self.room(1)
        start, parents = self.room(topology.num_nodes), np.array(topology.parents, np.int32)

        def by_level() -> Any:
            depths = np.array(topology.depths)
            levels = [np.flatnonzero(depths == depth + 1) for depth in range(topology.depth)]
            width, outside = max(map(len, levels)), topology.num_nodes
            padded = [
                np.pad(nodes, (0, width - len(nodes)), constant_values=outside) for nodes in levels
            ]

            def level(at: Any, states: Any) -> Any:
                nodes = jnp.array(padded)[at]
                return self.grown(states, nodes, jnp.array(parents)[nodes], tokens[:, nodes])

            return lax.fori_loop(0, len(levels), level, start)

        def by_parents() -> Any:
            def one_pass(depth: Any, states: Any) -> Any:
                below = self.advance(take(states, jnp.maximum(tree.parents, 0)), tokens)
                here = tree.depth == depth + 1
                return jax.tree.map(
                    lambda new, old: jnp.where(per_row(here, new), new, old), below, states
                )

            return lax.fori_loop(0, topology.depth, one_pass, start)

        same = (tree.parents == parents[None]) | ~tree.valid
        return lax.cond(same.all(), by_level, by_parents)

    def cut(
        self,
        count: Int[Array, " B"],
        depth: Int[Array, "B N"],
        on_path: Bool[Array, "B N"],
        allows_some: Bool[Array, "B N"] | None,
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"] | None]:
        """Emitted tokens up to a node where no token is allowed, and whether a row meets one."""
        if allows_some is None:
            return count, None
        most = jnp.iinfo(jnp.int32).max
        first = jnp.where(on_path & ~allows_some, depth, most).min(axis=-1)
        return jnp.minimum(count, first), first < count

    def commit(
        self,
        states: Any,
        last: Int[Array, " B"],
        new_tokens: Int[Array, "B _"],
        count: Int[Array, " B"],
    ) -> tuple[Any, ...]:
        """The states of the rows after a step's emitted tokens."""
        if not self.processors:
            return self.states
        end = jnp.maximum(count - 1, 0)[:, None]
        token = jnp.take_along_axis(new_tokens, end, axis=1)
        after = self.advance(take(states, jnp.maximum(last, 0)[:, None]), token)
        return jax.tree.map(
            lambda new, old: jnp.where(per_row(count > 0, old), new[:, 0], old), after, self.states
        )


def first_states(processors: tuple[Any, ...], context: Context, vocab_size: int) -> tuple[Any, ...]:
    """The states of processors after the texts."""
    classes = classes_of(processors)
    return _first_states(processors, context, vocab_size, classes) if processors else ()


@functools.partial(jax.jit, static_argnames=("vocab_size", "classes"))
def _first_states(
    processors: tuple[Any, ...], context: Context, vocab_size: int, classes: tuple[type, ...]
) -> tuple[Any, ...]:
    del classes  # a part of the program's key
    return tuple(processor.init(context, vocab_size) for processor in processors)
