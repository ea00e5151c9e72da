"""From an automaton over bytes to one over the tokens of a vocabulary."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stree_jax.decoding.grammar.automaton import Automaton, Row, tables_of

_STATES_AT_ONCE = 64


class ByteAutomaton(NamedTuple):
    """An automaton over bytes, in which every state leads to a text's end.

    Attributes:
        next_state: `[S, 256]`; -1 for bytes that are not allowed.
        accepts: `[S]`, whether a text may end. State 0 is the start.
    """

    next_state: np.ndarray
    accepts: np.ndarray


class TokenTree:
    """The texts of tokens as a tree of bytes: a node for each of their beginnings.

    Nodes are numbered level by level from 0, the empty text, and the children of a node are
    consecutive.
    """

    def __init__(self, texts: Sequence[bytes | None], ends: Sequence[int]):
        """Makes the tree.

        Args:
            texts: the text of each token; None: it has none, and is never allowed.
            ends: end tokens, whose texts do not count.
        """
        self.vocab_size, self.ends = len(texts), np.array(sorted(set(ends)), np.int64)
        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(texts):
            if text and token not in ends:
                ids.setdefault(text, []).append(token)
        beginnings = {text[:length] for text in ids for length in range(len(text) + 1)} | {b""}
        ordered = sorted(beginnings, key=lambda text: (len(text), text))
        numbers = {text: node for node, text in enumerate(ordered)}
        parents = np.array([numbers[text[:-1]] for text in ordered[1:]], np.int64)
        self.byte = np.array([0, *[text[-1] for text in ordered[1:]]], np.int64)
        self.num_children = np.bincount(parents, minlength=len(ordered))
        self.first_child = 1 + np.cumsum(self.num_children) - self.num_children
        of_node = [ids.get(text, []) for text in ordered]
        self.num_tokens = np.array([*map(len, of_node)], np.int64)
        self.first_token = np.cumsum(self.num_tokens) - self.num_tokens
        self.tokens = np.array([token for each in of_node for token in each], np.int64)
        self.single_bytes = [text[0] for text in ids if len(text) == 1]

    def automaton(self, of_bytes: ByteAutomaton) -> Automaton | None:
        """The automaton whose tokens spell what an automaton over bytes accepts.

        An end token is allowed where a text may end, and after it end tokens only.

        Returns:
            The automaton; None if there is no such text.
        """
        num_states = len(of_bytes.next_state)
        useful = np.ones(num_states + 1, bool)
        used = np.flatnonzero(np.any(of_bytes.next_state >= 0, axis=0))
        if not np.isin(used, self.single_bytes).all():
            # Some bytes are in longer tokens only, so tokens may not lead where bytes do.
            useful[:-1] = _leading_to(of_bytes.accepts, [*self._rows(of_bytes)])
            if not useful[0]:
                return None

        def rows() -> Iterator[Row]:
            for state, tokens, following in self._rows(of_bytes):
                kept = useful[following]
                tokens, following = tokens[kept], following[kept]
                if of_bytes.accepts[state]:
                    tokens = np.append(tokens, self.ends)
                    following = np.append(following, np.full(len(self.ends), num_states))
                    order = np.argsort(tokens)
                    tokens, following = tokens[order], following[order]
                if tokens.size:
                    yield state, tokens, following
            yield num_states, self.ends, np.full(len(self.ends), num_states)

        tables = tables_of(rows(), num_states + 1, self.vocab_size)
        return Automaton(tables, end_tokens=tuple(self.ends.tolist()))

    def _rows(self, of_bytes: ByteAutomaton) -> Iterator[Row]:
        """The states that tokens reach from the start on, and their transitions."""
        seen = np.zeros(len(of_bytes.next_state), bool)
        seen[0] = True
        waiting = [0]
        while waiting:
            states, waiting = waiting[:_STATES_AT_ONCE], waiting[_STATES_AT_ONCE:]
            table = self._after(of_bytes.next_state, np.array(states))
            for state, row in zip(states, table, strict=True):
                tokens = np.flatnonzero(row >= 0)
                yield state, tokens, row[tokens]
            reached = np.zeros(len(seen) + 1, bool)
            reached[table] = True  # -1 is the last
            new = np.flatnonzero(reached[:-1] & ~seen)
            seen[new] = True
            waiting += new.tolist()

    def _after(self, next_state: np.ndarray, states: np.ndarray) -> np.ndarray:
        """The state after each token, from several states: `[states, V]`, -1 if not allowed."""
        table = np.full((len(states), self.vocab_size), -1, np.int32)
        rows, nodes = np.arange(len(states)), np.zeros(len(states), np.int64)
        while rows.size:
            nodes, parent = _expanded(self.first_child[nodes], self.num_children[nodes])
            rows, states = rows[parent], next_state[states[parent], self.byte[nodes]]
            alive = states >= 0
            rows, nodes, states = rows[alive], nodes[alive], states[alive]
            places, node = _expanded(self.first_token[nodes], self.num_tokens[nodes])
            table[rows[node], self.tokens[places]] = states[node]
        return table


def _expanded(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`first`, `first + 1`, ... of each entry, as many as its count, and the entry of each.

    Worked example: first 5 9, count 2 1 gives 5 6 9, of entries 0 0 1.
    """
    entry = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(count) - count, count)
    return first[entry] + within, entry


def _leading_to(ends: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """Which states lead to a text's end."""
    pairs = [(state, after) for state, _, following in rows for after in np.unique(following)]
    states, following = np.array(pairs, np.int64).reshape(-1, 2).T
    found = ends.copy()
    while (new := states[found[following] & ~found[states]]).size:
        found[new] = True
    return found
