"""From automata over bytes to those over the tokens of a vocabulary."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from stree_jax.extensions.grammar.automaton import Automaton
from stree_jax.extensions.grammar.byte_automaton import ByteAutomaton
from stree_jax.extensions.grammar.graph import TooLarge, leading_to
from stree_jax.extensions.grammar.tables import Compressor

# Pairs of a state and a node of the tree: in memory, and in all.
_AT_ONCE, _MOST_WORK = 1 << 22, 1 << 28


class TokenTree:
    """Texts of tokens as a tree, numbered level by level: a node for each beginning."""

    def __init__(self, texts: Sequence[bytes | None], ends: Sequence[int]):
        """Makes the tree of texts that are there, but those of ends."""
        self.vocab_size, self.ends = len(texts), np.array(sorted(set(ends)), np.int64)
        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(texts):
            if text and token not in ends:
                ids.setdefault(text, []).append(token)
        starts = {text[:size] for text in (b"", *ids) for size in range(len(text) + 1)}
        nodes = sorted(starts, key=lambda text: (len(text), text))
        numbers = {text: node for node, text in enumerate(nodes)}
        parents = np.array([numbers[text[:-1]] for text in nodes[1:]], np.int64)
        self.byte = np.array([0, *(text[-1] for text in nodes[1:])])
        self.num_children = np.bincount(parents, minlength=len(nodes))
        self.first_child = 1 + np.cumsum(self.num_children) - self.num_children
        self.num_tokens = np.array([len(ids.get(text, [])) for text in nodes])
        self.first_token = np.cumsum(self.num_tokens) - self.num_tokens
        self.tokens = np.array([token for text in nodes for token in ids.get(text, [])], np.int64)
        first = np.array([text[0] for text in nodes[1:]], np.int64)
        self.size_below = np.bincount(first, minlength=256)  # nodes below a first byte
        self.single_bytes = [text[0] for text in ids if len(text) == 1]

    def automaton(self, of_bytes: ByteAutomaton) -> Automaton | None:
        """Makes the automaton whose tokens spell another's texts; None: of none."""
        final = len(of_bytes.table)
        useful = np.ones(final, bool)
        used = np.flatnonzero(np.any(of_bytes.table >= 0, axis=0)[of_bytes.class_of])
        if not np.isin(used, self.single_bytes).all():  # then tokens may not lead where bytes do
            ways = ((state, np.unique(after).tolist()) for state, _, after in self._rows(of_bytes))
            leading = leading_to(np.flatnonzero(of_bytes.accepts).tolist(), ways)
            useful = np.isin(np.arange(final), [*leading])
            if not useful[0]:
                return None
        tables = Compressor(final + 1, self.vocab_size)
        for state, tokens, after in self._rows(of_bytes):
            if not useful.all():
                tokens, after = tokens[useful[after]], after[useful[after]]
            if of_bytes.accepts[state]:
                tokens = np.append(tokens, self.ends)
                after = np.append(after, np.full(len(self.ends), final))
            tables.add(state, tokens, after)
        tables.add(final, self.ends, np.full(len(self.ends), final))
        return Automaton(tables.tables(), end_tokens=tuple(self.ends.tolist()))

    def _rows(self, of_bytes: ByteAutomaton) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields each state, its tokens, and the states after them."""
        dead, num_classes = of_bytes.table.shape
        table = np.where(of_bytes.table < 0, dead, of_bytes.table).astype(np.int32).ravel()
        table = np.append(table, np.full(num_classes, dead, np.int32))
        class_of = of_bytes.class_of.astype(np.int32)
        goes_on, work = of_bytes.table >= 0, 0
        sizes = goes_on[:, class_of] @ self.size_below
        _, alike = np.unique(goes_on, axis=0, return_inverse=True)
        order = np.argsort(alike.ravel(), kind="stable").astype(np.int32)
        bounds = np.append(0, np.cumsum(np.bincount(alike.ravel())))
        for first, last in itertools.pairwise(bounds.tolist()):
            count = int(np.clip(_AT_ONCE // (sizes[order[first]] + 1), 1, 64))
            for at_first in range(first, last, count):
                states = order[at_first : min(at_first + count, last)]
                nodes, at = np.zeros(1, np.int64), states[None]
                tokens_below, after = [], []
                while nodes.size:
                    children, parent = _expanded(self.first_child[nodes], self.num_children[nodes])
                    kinds = class_of[self.byte[children]]
                    at = table.take(at.take(parent, axis=0) * num_classes + kinds[:, None])
                    kept = np.flatnonzero((at != dead).any(axis=1))
                    work += at.size
                    if work > _MOST_WORK:
                        raise TooLarge(f"it takes too much work with {self.vocab_size} tokens")
                    at, nodes = at[kept], children[kept]
                    places, column = _expanded(self.first_token[nodes], self.num_tokens[nodes])
                    tokens_below.append(self.tokens[places])
                    after.append(at[column])
                tokens, reached = np.concatenate(tokens_below), np.concatenate(after).T.copy()
                for state, row in zip(states.tolist(), reached, strict=True):
                    some = np.flatnonzero(row != dead)
                    yield state, tokens[some], row[some]


def _expanded(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns as many numbers from `first` on as `count`, and their entries.

    Worked example: first 5 9, count 2 1 gives 5 6 9, of entries 0 0 1.
    """
    entry = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(count) - count, count)
    return first[entry] + within, entry
