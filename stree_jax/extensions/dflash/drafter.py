"""Drafting with a DFlash head: a table of outputs by depth, of which trees take their levels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import logsumexp

from pallas_kernels import KVCache, replay_kv
from stree_jax import DraftTree, HybridLM, Tree, Verdict
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding import DraftModel, KnownNodes, LevelNodes
from stree_jax.decoding.drafters import HeadDrafter
from stree_jax.extensions.dflash.head import DFlashHead
from stree_jax.heads import check_head
from stree_jax.models import embedded_tokens, output_logits


class DFlashState(NamedTuple):
    """Keys and values of the tokens before the root; within a step, its block."""

    caches: tuple[KVCache, ...]
    outputs: Float[Array, "B D M"] | None = None
    table: Float32[Array, "B D V"] | None = None  # logits by depth, without the Markov head's
    candidates: Int[Array, "B D K"] | None = None  # if not all
    pending: None = None


class DFlashModel(DraftModel):
    """A draft model: a head with embedding and output head of its target, on one device.

    Raises:
        ValueError: a head of another width, vocabulary or dtype, or on layers that the target does
            not have.
    """

    def __init__(self, target: HybridLM, head: DFlashHead):
        self.head, self.config = head, target.config
        owner: Any = head if head.config.own_tokens else target
        self.embedding, self.output_head = owner.embedding, owner.output_head
        self.inner_layers: tuple[int, ...] = head.config.inner_layers
        self.max_depth: int = head.config.num_drafts
        self.check_target(target)

    def check_target(self, target: HybridLM) -> None:
        check_head("a DFlash head", self.head, target)

    def init(self, batch: int, num_nodes: int, max_length: int) -> DFlashState:
        return DFlashState(self.head.init_cache(batch, max_length))

    def read(self, state: DFlashState, tokens: Array, hidden: Any, lengths: Array) -> DFlashState:
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return self._after(state, hidden, steps[None] < lengths[:, None])

    def commit(
        self,
        state: DFlashState,
        tree: object,
        place: object,
        draft: DraftTree,
        verdict: Verdict,
        hidden: Float[Array, "B N _"],
    ) -> DFlashState:
        """See `DraftModel`: appends the path, of the target's states."""
        path = draft.tree.on_path(jnp.maximum(verdict.last, 0))
        return self._after(state, hidden, path & (verdict.last >= 0)[:, None])

    def run(
        self,
        state: DFlashState,
        tokens: Int[Array, "B Q"],
        tree: Tree,
        nodes: KnownNodes | LevelNodes,
    ) -> tuple[Float32[Array, "B Q V"], DFlashState]:
        """See `DraftModel`: one pass for the root, then rows of its table."""
        if isinstance(nodes, KnownNodes):
            outputs = self.block(tokens, state.caches)
            table, candidates = self.table(outputs)
            state = state._replace(outputs=outputs, table=table, candidates=candidates)
        logits = _at_depth(state.table, tree, nodes)
        outputs = self.with_rows(_at_depth(state.outputs, tree, nodes), tokens)
        candidates = state.candidates
        if candidates is not None:
            candidates = _at_depth(candidates, tree, nodes)
        return self.after(outputs, logits, candidates), state

    def log_confidence(
        self, state: DFlashState, tokens: Array, tree: Tree, nodes: KnownNodes | LevelNodes
    ) -> Float32[Array, "B Q"] | float:
        """See `DraftModel`: what the confidence head says, if there is one."""
        if self.head.config.confidence_head == "none":
            return super().log_confidence(state, tokens, tree, nodes)
        outputs = self.with_rows(_at_depth(state.outputs, tree, nodes), tokens)
        return jax.nn.log_sigmoid(self.head.confidence(outputs))

    def finish_step(self, state: DFlashState) -> DFlashState:
        """See `DraftModel`: drafts of a step leave nothing behind."""
        return DFlashState(state.caches)

    def block(self, roots: Int[Array, "B 1"], caches: tuple[KVCache, ...]) -> Float[Array, "B D M"]:
        """Outputs of a block, at the places with drafts."""
        c = self.head.config
        tokens = jnp.pad(roots, ((0, 0), (0, c.block_size - 1)), constant_values=c.mask_token)
        embedded = embedded_tokens(tokens, self.embedding, 1.0)
        return self.head(embedded, caches)[:, not c.shifted :]

    def table(self, outputs: Float[Array, "B T _"]) -> tuple[Array, Array | None]:
        """Logits from outputs alone, and the tokens that are candidates, if not all are."""
        c = self.head.config
        hidden = outputs[..., : c.d_model]
        logits = output_logits(hidden, self.output_head, 1.0, self.head.implementation)
        logits = logits[..., : c.vocab_size]
        return logits, lax.top_k(logits, c.candidates)[1] if c.candidates else None

    def scores(
        self, outputs: Array, table: Array, candidates: Array
    ) -> tuple[Float32[Array, "*rows K"], Float32[Array, "*rows K"]]:
        """The candidates' logits of the table, and these with the scores of pairs."""
        rows = outputs[..., self.head.config.d_model :]
        before = jnp.take_along_axis(table, candidates, axis=-1)
        return before, before + self.head.pairs(rows, candidates)

    def after(
        self, outputs: Float[Array, "B T _"], table: Array, candidates: Array | None
    ) -> Float32[Array, "B T V"]:
        """Logits of the target's tokens: the table's, and what the rows after outputs add.

        Scores of pairs say which candidate is how likely if it is one of them; that it is one stays
        as likely as by the table.
        """
        if candidates is None:
            rows = outputs[..., self.head.config.d_model :]
            return table + self.head.after(rows) if rows.shape[-1] else table
        before, scores = self.scores(outputs, table, candidates)
        was, now = (logsumexp(x, axis=-1, keepdims=True) for x in (before, scores))
        return jnp.put_along_axis(table, candidates, scores + (was - now), axis=-1, inplace=False)

    def logits(self, outputs: Float[Array, "B T _"]) -> Float32[Array, "B T V"]:
        """Logits of the target's tokens, from outputs and, if given, rows of the Markov head."""
        return self.after(outputs, *self.table(outputs))

    def outputs_ahead(
        self, tokens: Int[Array, "B T"], hidden: Float[Array, "B T _"], depth: int
    ) -> list[Float[Array, "B T _"]]:
        """See `HeadModel`: of a block at each token, as `logits` takes them."""
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[:, None]
        outputs = lax.map(lambda place: self.outputs_at(tokens, hidden, place)[:, 0], places)
        return [outputs[:, :, at].swapaxes(0, 1) for at in range(min(depth, self.max_depth))]

    def outputs_at(
        self, tokens: Int[Array, "B T"], hidden: Float[Array, "B T _"], places: Int[Array, " A"]
    ) -> Float[Array, "B A D _"]:
        """Outputs of the blocks whose roots follow these places, of drafts that are the text."""
        batch, length = tokens.shape
        steps = jnp.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)

        def of_blocks(leaf: Array) -> Array:
            return jnp.repeat(leaf.swapaxes(1, 2), len(places), axis=0)

        lengths = jnp.tile(places + 1, batch)
        caches = tuple(
            KVCache(of_blocks(entries.keys), of_blocks(entries.values), lengths)
            for entries in self.head.entries(hidden[..., self.config.d_model :], steps)
        )
        ahead = places[:, None] + 1 + np.arange(self.max_depth, dtype=np.int32)
        known = tokens[:, jnp.minimum(ahead, length - 1)]  # before each draft
        outputs = self.block(known[:, :, 0].reshape(-1, 1), caches)
        return self.with_rows(outputs.reshape(*known.shape, -1), known)

    def with_rows(self, outputs: Float[Array, "B *rows M"], before: Array) -> Array:
        """Outputs of places, followed by the Markov head's rows, if any, of the tokens before."""
        if not self.head.config.markov_rank:
            return outputs
        rows = self.head.markov_embedding.rows(before.reshape(len(before), -1))
        rows = rows.astype(outputs.dtype).reshape(*before.shape, -1)
        if self.head.config.candidates:
            rows *= self.head.selector(outputs)
        return jnp.concatenate([outputs, rows], axis=-1)

    def _after(
        self, state: DFlashState, hidden: Float[Array, "B N _"], read: Bool[Array, "B N"]
    ) -> DFlashState:
        """The state after the tokens that were read."""
        start, places = state.caches[0].length, jnp.cumsum(read, axis=1, dtype=jnp.int32) - 1
        entries = self.head.entries(hidden[..., self.config.d_model :], start[:, None] + places)
        caches = zip(state.caches, entries, self.head.config.windows, strict=True)
        kept = [replay_kv(cache, new, read, ring=size is not None) for cache, new, size in caches]
        return DFlashState(tuple(kept))


def _at_depth(table: Any, tree: Tree, nodes: KnownNodes | LevelNodes) -> Array:
    """The row of each node in a table of a step's depths."""
    depths = tree.depth[:, jnp.minimum(nodes.nodes, tree.depth.shape[1] - 1), None]
    return jnp.take_along_axis(table, depths, axis=1)


class DFlashDrafter(HeadDrafter):
    """Fills a static tree from the block of a DFlash head.

    `child_sampling` is that of `ModelDrafter`, and all else that of `DFlashModel`.
    """

    draft_model_of = DFlashModel
