"""Drafting by prompt lookup: no draft model, only the text so far."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array
from stree_jax.checks import check_int
from stree_jax.decoding.drafters.base import Drafter
from stree_jax.decoding.drafters.levels import levels_of
from stree_jax.decoding.types import DraftTree, Step, Verdict
from stree_jax.tree import TreeTopology

MAX_MATCH = 64  # each length is an operation of the program


class NgramDrafter(Drafter):
    """Prompt lookup: drafts what followed the same tokens earlier in the prompt or the output.

    A node's children are the different tokens that followed the last tokens of its path, longest
    match first, then latest. Without matches a tree has fewer nodes, or only its root.

    Args:
        max_match: longest match that is searched for, in tokens.
        min_match: shortest match that counts, in tokens.

    Raises:
        ValueError: not integers with `1 <= min_match <= max_match <= MAX_MATCH`.
    """

    inner_layers = None

    def __init__(self, *, max_match: int = 3, min_match: int = 1):
        self.max_match = check_int("max_match", max_match, 1, MAX_MATCH)
        self.min_match = check_int(f"min_match, with {max_match = },", min_match, 1, max_match)

    def default_topology(self) -> TreeTopology:
        """A chain of 4: a match is usually right for several tokens, or for none."""
        return TreeTopology.chain(4)

    def init(self, batch: int, topology: TreeTopology, max_length: int) -> None:
        """See `Drafter`. The context of a step has everything, so there is no state."""

    def read(self, state: None, tokens: Array, hidden: object, lengths: Array) -> None: ...

    def propose(self, state: None, step: Step, topology: TreeTopology) -> tuple[DraftTree, None]:
        grow = functools.partial(self._grow, topology=topology)
        tokens, valid = jax.vmap(grow)(step.context.tokens, step.context.length)
        return DraftTree.of(tokens, topology.tree(valid)), None

    def commit(
        self, state: None, draft: DraftTree, verdict: Verdict, hidden: Array, topology: TreeTopology
    ) -> None: ...

    def _grow(self, row: Array, length: Array, topology: TreeTopology) -> tuple[Array, Array]:
        """Tokens and validity `[N]` of one row's tree."""
        # The last max_match tokens before each position, latest first; -1 before the start, -2 in
        # queries, so that the two never match.
        places = jnp.arange(row.shape[0], dtype=jnp.int32)[None]
        texts = row[None]
        history = [
            jnp.where(places > k, jnp.roll(texts, k + 1, axis=1), -1) for k in range(self.max_match)
        ]
        ends = length - 1 - jnp.arange(self.max_match, dtype=jnp.int32)
        root_tail = jnp.where(ends >= 0, row[jnp.maximum(ends, 0)], -2)

        # Level by level, all nodes of a level with children at once.
        tokens, valid, tails = row[length - 1][None], jnp.ones(1, bool), root_tail[None]
        all_tokens, all_valid = [tokens], [valid]
        for level in levels_of(topology):
            is_longer, match = jnp.bool_(True), jnp.int32(0)
            for k in range(self.max_match):
                is_longer = is_longer & (history[k] == tails[:, k, None])
                match = match + is_longer.astype(jnp.int32)
            score = jnp.where(
                (match >= self.min_match) & (places < length), match * row.shape[0] + places, -1
            )
            best: list[Array] = []  # by rank among siblings
            matched: list[Array] = []
            for rank in range(max(level.rank) + 1):
                if rank:  # exclude the tokens of earlier siblings
                    score = jnp.where(texts == best[-1][:, None], -1, score)
                highest = score.max(axis=1)
                best.append(row[jnp.maximum(highest, 0) % row.shape[0]])
                matched.append((highest >= 0) & valid)
            ranks, source = np.array(level.rank), np.array(level.source)
            tokens, valid = jnp.stack(best)[ranks, source], jnp.stack(matched)[ranks, source]
            all_tokens.append(tokens)
            all_valid.append(valid)
            tails = jnp.concatenate([tokens[:, None], tails[source, :-1]], axis=1)
            inner = np.flatnonzero([bool(topology.children[node]) for node in level.children])
            tails, valid = tails[inner], valid[inner]
        return jnp.concatenate(all_tokens), jnp.concatenate(all_valid)
