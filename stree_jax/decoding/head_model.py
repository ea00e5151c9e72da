"""The state of heads on the target's hidden states, such as multi-token-prediction heads.

All that is kept between steps follows from the text: keys and values of the pairs (token, target's
state before it), and the target's last state. What a head itself outputs feeds the nodes below,
within a step, and is then forgotten. So drafts depend on the text alone, however it was cut into
prompt, pieces, steps and forks.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVCache, NodeKV, replay_kv
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.draft_model import DraftModel
from stree_jax.decoding.types import DraftTree, Verdict
from stree_jax.models.cache import path_to
from stree_jax.models.lm import embedded_tokens
from stree_jax.tree import KnownNodes, LevelNodes, Tree


class HeadPending(NamedTuple):
    """The record of the nodes that the head has run in a step."""

    kv: NodeKV
    hidden: Float[Array, "B N M"]  # outputs of the head, inputs of the nodes' children


class HeadState(NamedTuple):
    """The state of a head.

    After a text of n tokens the cache has n - 2 entries, of tokens 1 to n - 2 and the target's
    states before them. The first token is in no entry, and the last is the root of the next tree,
    whose own entry is made when it is run.
    """

    kv: KVCache
    hidden: Float[Array, "B M"]  # the target's state before the root
    known: Bool[Array, " B"]  # False for a text of one token, which has no such state
    pending: HeadPending | None = None  # within a step


class HeadModel(DraftModel):
    """A head on a target's states as a draft model: one attention layer first, and what follows it.

    A subclass sets `head`, `config` and `embedding`, and has `logits` and `check_target`.
    """

    embedding: Any  # the target's
    head: Any  # with what a `DraftHead` has: `init_cache`, `entries`, `tree`

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """The target's embeddings, unless overridden."""
        return embedded_tokens(tokens, self.embedding, self.config.embedding_multiplier)

    def logits(self, outputs: Float[Array, "B Q M"]) -> Float32[Array, "B Q V"]:
        """Logits over the target's vocabulary, without padding."""
        raise NotImplementedError

    def states(self, hidden: Float[Array, "B T _"]) -> Float[Array, "B T M"]:
        """The head's input from the target's states: all of them, unless overridden."""
        return hidden

    def init(self, batch: int, num_nodes: int, max_length: int) -> HeadState:
        hidden = jnp.zeros((batch, self.config.d_model), self.head.activation_dtype)
        return HeadState(self.head.init_cache(batch, max_length), hidden, jnp.zeros(batch, bool))

    def read(self, state: HeadState, tokens: Array, hidden: Any, lengths: Array) -> HeadState:
        hidden = self.states(hidden)
        above = jnp.concatenate([state.hidden[:, None], hidden[:, :-1]], axis=1)
        read = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        return self._after(state, tokens, above, read, hidden, lengths - 1)

    def ready(self, state: HeadState) -> Bool[Array, " B"]:
        return state.known

    def run(
        self,
        state: HeadState,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: KnownNodes | LevelNodes,
    ) -> tuple[Float32[Array, "B Q V"], HeadState]:
        queries, pending = nodes.with_ancestors(tree), state.pending
        embedded = self.embedded(tokens)
        if isinstance(nodes, KnownNodes):
            output, kv = self.head.tree(embedded, state.hidden[:, None], queries, state.kv)
            return self.logits(output), state._replace(pending=HeadPending(kv, output))
        assert pending is not None  # there is a root above
        parents = tree.parents[:, jnp.minimum(nodes.nodes, tree.parents.shape[1] - 1), None]
        above = jnp.take_along_axis(pending.hidden, parents, axis=1)
        output, kv = self.head.tree(embedded, above, queries, state.kv, pending.kv)
        record = HeadPending(kv, jnp.concatenate([pending.hidden, output], axis=1))
        return self.logits(output), state._replace(pending=nodes.recorded(pending, record))

    def finish_step(self, state: HeadState) -> HeadState:
        """See `DraftModel`: drafts of a step leave nothing behind."""
        return state._replace(pending=None)

    def commit(
        self,
        state: HeadState,
        tree: object,
        place: object,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N _"],
    ) -> HeadState:
        """See `DraftModel`: appends the entries of the path, with the target's states."""
        hidden = self.states(hidden)
        above = jnp.take_along_axis(hidden, jnp.maximum(draft.tree.parents, 0)[..., None], axis=1)
        above = above.at[:, 0].set(state.hidden)
        path = path_to(draft.tree, verdict.last).mask
        return self._after(state, draft.tokens, above, path, hidden, verdict.last)

    def outputs_ahead(
        self, tokens: Int[Array, "B T"], hidden: Float[Array, "B T _"], depth: int
    ) -> list[Float[Array, "B T M"]]:
        """Outputs of a head at every position of texts, as a chain of drafts has them there.

        Entry p of output k = 0, 1, ... predicts token p + 2 + k, in the step whose root is token
        p + 1: it has read the true entries 0 to p, and then the tokens p + 2 to p + 1 + k with the
        head's own outputs. Worked example, three tokens and depth 2: the query of the second level
        at p = 0 attends to the first entry of level 0, and to its own level alone:

            [1 0 0 | 1 0 0]   p = 0
            [1 1 0 | 0 1 0]   p = 1
            [1 1 1 | 0 0 1]   p = 2

        Args:
            tokens: the texts.
            hidden: the target's states at all tokens, as `Drafter.read` gets them.
            depth: number of outputs.

        Returns:
            The outputs, each with `T` entries, which `logits` takes; those that need tokens
            past the end of the text are unspecified.
        """
        batch, length = tokens.shape
        cache = self.head.init_cache(batch, 0)
        outputs: list[Array] = []
        above = self.states(hidden)
        prefix = None
        for level in range(depth):
            places = jnp.minimum(jnp.arange(length, dtype=jnp.int32) + 1 + level, length - 1)
            itself = np.eye(length, dtype=bool)
            mask = np.concatenate([np.tri(length, dtype=bool), *[itself] * level], axis=1)
            # For its positions: entries are consecutive. The parents do not matter.
            depths = np.arange(level + 1)[:, None] + np.arange(length)
            depths = depths.ravel().astype(np.int32)
            row = depths, depths, mask, np.ones(len(depths), bool)
            tree = Tree(*(jnp.broadcast_to(leaf, (batch, *leaf.shape)) for leaf in row))
            embedded = self.embedded(tokens[:, places])
            above, prefix = self.head.tree(embedded, above, tree, cache, prefix)
            outputs.append(above)
        return outputs

    def _after(
        self,
        state: HeadState,
        tokens: Int[Array, "B N"],
        above: Float[Array, "B N M"],
        read: Bool[Array, "B N"],
        hidden: Float[Array, "B N M"],
        last: Int[Array, " B"],
    ) -> HeadState:
        """The state after the tokens that were read."""
        first = np.arange(tokens.shape[1])[None] == 0
        kept = read & (state.known[:, None] | ~first)
        positions = state.kv.length[:, None] + jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
        entries = self.head.entries(self.embedded(tokens), above, positions)
        return with_last(state, hidden, last)._replace(kv=replay_kv(state.kv, entries, kept))


def with_last(state: Any, hidden: Float[Array, "B _ M"], last: Int[Array, " B"]) -> Any:
    """A state with the target's at node `last` as `hidden`; rows where that is -1 keep theirs."""
    is_active = last >= 0
    place = jnp.maximum(last, 0)[:, None, None]
    new = jnp.take_along_axis(hidden, place, axis=1)[:, 0].astype(state.hidden.dtype)
    return state._replace(
        hidden=jnp.where(is_active[:, None], new, state.hidden), known=state.known | is_active
    )
