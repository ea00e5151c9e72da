"""From an automaton over bytes to one over the tokens of a vocabulary."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stree_jax.extensions.grammar.automaton import ABSOLUTE, Automaton, Compressor
from stree_jax.extensions.grammar.byte_automaton import ByteAutomaton
from stree_jax.extensions.grammar.graph import Body, TextSet, TooLarge

_MOST_STARTS = 256
# Pairs of a state and a node of the tree: in memory, and in all, which is some 4 s.
_AT_ONCE, _MOST_AT_ONCE, _MOST_WORK = 1 << 19, 1 << 21, 1 << 25


class Reached(NamedTuple):
    """Nodes of the tree, or tokens, that states lead to.

    Attributes:
        start: which of the starts.
        node: the node, or the token.
        state: the state there.
        mark: whether the way has left the body where it began, or the characters that it begins.
    """

    start: np.ndarray
    node: np.ndarray
    state: np.ndarray
    mark: np.ndarray

    def some(self, chosen: np.ndarray | slice) -> "Reached":
        """Some of them."""
        return Reached(*(part[chosen] for part in self))


# A state, the tokens that it allows and their codes, see `Compressor.add`.
Row = tuple[int, np.ndarray, np.ndarray]
# From states, marks and bytes to the next states, -1 for none, and marks.
_Step = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


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
        ordered = sorted(ids)
        lengths = np.array([len(text) for text in ordered], np.int64)
        letters = np.zeros((len(ordered), int(lengths.max(initial=0))), np.uint8)
        for row, text in zip(letters, ordered, strict=True):
            row[: len(text)] = np.frombuffer(text, np.uint8)
        # Texts with one beginning stand together, so a level's nodes are where beginnings change.
        node_of = np.zeros(len(ordered), np.int64)
        parents, byte, num_nodes = [node_of[:0]], [np.zeros(1, np.uint8)], 1
        for length in range(1, letters.shape[1] + 1):
            rows = np.flatnonzero(lengths >= length)
            before, last = node_of[rows], letters[rows, length - 1]
            is_new = np.append(True, (np.diff(before) != 0) | (np.diff(last) != 0))
            node_of[rows] = num_nodes - 1 + np.cumsum(is_new)
            num_nodes += int(is_new.sum())
            parents.append(before[is_new])
            byte.append(last[is_new])
        self.byte = np.concatenate(byte)
        self.num_children = np.bincount(np.concatenate(parents), minlength=num_nodes)
        self.first_child = 1 + np.cumsum(self.num_children) - self.num_children
        order = np.argsort(node_of)
        of_text = [ids[ordered[i]] for i in order]
        self.num_tokens = np.zeros(num_nodes, np.int64)
        self.num_tokens[node_of[order]] = [*map(len, of_text)]
        self.first_token = np.cumsum(self.num_tokens) - self.num_tokens
        self.tokens = np.array([token for each in of_text for token in each], np.int64)
        self.single_bytes = [text[0] for text in ids if len(text) == 1]
        self._of_set = functools.lru_cache(maxsize=64)(self._in_set)
        self._ends_of_set = functools.lru_cache(maxsize=64)(self._ends_in_set)
        self._work = 0

    def automaton(self, of_bytes: ByteAutomaton) -> Automaton | None:
        """The automaton whose tokens spell what an automaton over bytes accepts.

        An end token is allowed where a text may end, and after it end tokens only.

        Returns:
            The automaton; None if there is no such text.

        Raises:
            TooLarge: it takes too much work.
        """
        self._work, final = 0, of_bytes.num_states
        rows: Iterable[Row] = self._listed(of_bytes)
        bodies = [self._of_body(of_bytes, body) for body in of_bytes.bodies]
        useful = of_bytes.useful
        if not self._has_all_bytes(of_bytes):  # then tokens may not lead where bytes do
            rows = listed = [*rows]
            useful = _leading_to_ends(of_bytes, listed, bodies)
            if not useful[0]:
                return None
        tables = Compressor(final + 1, self.vocab_size)
        at_end = tables.move(self.ends, np.full(len(self.ends), ABSOLUTE + final), is_extra=True)
        tables.add([final], self.ends, 0, at_end)
        for state, tokens, codes in rows:
            kept = useful[_after(state, codes)]
            move, ends = tables.move(tokens[kept], codes[kept]), bool(of_bytes.accepts[state])
            tokens = np.append(tokens[kept], self.ends[: ends * len(self.ends)])
            tables.add([state], tokens, move, at_end * ends)
        moves: dict[Any, int] = {}
        for body, tokens_of in zip(of_bytes.bodies, bodies, strict=True):
            self._add_body(of_bytes, tables, body, tokens_of, useful, moves)
        return Automaton(tables.tables(), end_tokens=tuple(self.ends.tolist()))

    def _has_all_bytes(self, of_bytes: ByteAutomaton) -> bool:
        """Whether tokens lead where bytes do: each byte that is used is a token."""
        used = np.any(of_bytes.table >= 0, axis=0)[of_bytes.class_of]
        for body in of_bytes.bodies:
            used |= np.any(body.texts.after >= 0, axis=0)[body.texts.class_of]
        return bool(np.isin(np.flatnonzero(used), self.single_bytes).all())

    def _listed(self, of_bytes: ByteAutomaton) -> Iterator[Row]:
        """The transitions of the states that are in no body."""

        def step(
            states: np.ndarray, has_left: np.ndarray, byte: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            after = of_bytes.after(states, byte)
            if of_bytes.bodies:
                has_left = has_left | (of_bytes.body_of(after) != of_bytes.body_of(states))
            return after, has_left

        states = np.arange(len(of_bytes.table))
        for levels in self._walks(np.zeros_like(states), states, step):
            found = _by_start(map(self._tokens_at, levels))
            for state in levels[0].start.tolist():
                own = found.some(slice(*np.searchsorted(found.start, [state, state + 1])))
                codes = np.where(own.mark, ABSOLUTE + own.state, own.state - state)
                yield state, own.node, codes

    def _of_body(self, of_bytes: ByteAutomaton, body: Body) -> tuple[Reached, Reached]:
        """The tokens that stay in a body, and those that leave it."""
        follows = (of_bytes.table[body.end] >= 0)[of_bytes.class_of]
        ends = self._ends_of_set(body.texts, np.packbits(follows).tobytes())
        nodes, which = np.unique(ends.node, return_inverse=True)
        states = of_bytes.table[body.end][of_bytes.class_of[self.byte[nodes]]]

        levels = itertools.chain(
            *self._walks(nodes, states, lambda at, mark, byte: (of_bytes.after(at, byte), mark))
        )
        out = _by_start(map(self._tokens_at, levels))
        first = np.searchsorted(out.start, np.arange(len(nodes) + 1))
        places, of_end = _expanded(first[which], np.diff(first)[which])
        leaving = Reached(
            ends.start[of_end], out.node[places], out.state[places], ends.mark[of_end]
        )
        inside, _ = self._of_set(body.texts)
        return inside, _by_start([leaving])

    def _add_body(
        self,
        of_bytes: ByteAutomaton,
        tables: Compressor,
        body: Body,
        tokens_of: tuple[Reached, Reached],
        useful: np.ndarray,
        moves: dict[Any, int],
    ) -> None:
        """Adds the states of a body.

        Tokens that stay in it do the same in all bodies of its set. A state differs from that
        of another count in which tokens it allows: those with too many characters, or too few
        before the end, are out.
        """
        size = len(body.texts.after)
        leads = useful[body.first :][: body.leads.size].reshape(body.leads.shape)
        bounds = [np.searchsorted(each.start, np.arange(size + 1)) for each in tokens_of]
        final = np.full(len(self.ends), ABSOLUTE + of_bytes.num_states)
        longest = max(int(each.mark.max(initial=0)) for each in tokens_of)
        groups = _same_counts(body, leads, longest)
        for position in range(size):
            inside, leaving = (
                each.some(slice(*at[position : position + 2]))
                for each, at in zip(tokens_of, bounds, strict=True)
            )
            for same in groups:
                counts = same[leads[same, position]]
                if not counts.size:
                    continue
                begun = counts[0] + inside.mark
                after = body.counts_after(begun)
                stays = (after >= 0) & leads[after, inside.state]
                counts_on = body.beyond >= 0 and begun.max(initial=0) > body.last
                move = moves.get(key := (body.texts, position, counts[0] if counts_on else None))
                if move is None:  # the same for all counts that go on
                    count = after if counts_on else begun
                    distance = (count - counts[0]) * size + inside.state - position
                    move = moves[key] = tables.move(inside.node, distance)
                leaves = body.counts_after(counts[0] + leaving.mark) >= body.least
                outside = leaving.some(leaves & useful[leaving.state])
                tokens, codes = outside.node, ABSOLUTE + outside.state
                states = body.first + counts * size + position
                if of_bytes.accepts[states[0]]:
                    tokens, codes = np.append(tokens, self.ends), np.append(codes, final)
                extra = tables.move(tokens, codes, is_extra=True)
                tables.add(states, np.append(inside.node[stays], tokens), move, extra)

    def _in_set(self, texts: TextSet) -> tuple[Reached, Reached]:
        """The tokens that stay in a body, and the nodes of the tree at which it may end."""

        def step(
            states: np.ndarray, counts: np.ndarray, byte: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            after = texts.after[states, texts.class_of[byte]].astype(np.int64)
            return after, counts + texts.begins[states]

        positions = np.arange(len(texts.after))
        levels = [*itertools.chain(*self._walks(np.zeros_like(positions), positions, step))]
        ends = [level.some(texts.accepts[level.state]) for level in levels]
        return _by_start(map(self._tokens_at, levels)), _by_start(ends)

    def _ends_in_set(self, texts: TextSet, follows: bytes) -> Reached:
        """The nodes at which a body has ended with the byte before, one of those that follow."""
        _, ends = self._of_set(texts)
        children, of_end = _expanded(self.first_child[ends.node], self.num_children[ends.node])
        is_one = np.unpackbits(np.frombuffer(follows, np.uint8)).astype(bool)[self.byte[children]]
        return ends.some(of_end[is_one])._replace(node=children[is_one])

    def _walks(self, nodes: np.ndarray, states: np.ndarray, step: _Step) -> Iterator[list[Reached]]:
        """Walks down the tree from some nodes with a state each, several at a time.

        Yields:
            The nodes that these reach, level by level; the first level is the starts themselves.
        """
        at, count = 0, 16
        while at < len(nodes):
            start = np.arange(at, min(at + count, len(nodes)), dtype=np.int32)
            level = Reached(start, nodes[start], states[start], np.zeros(len(start), np.int32))
            levels, size = [level], 0
            while level.start.size and (size <= _MOST_AT_ONCE or len(start) == 1):
                children, parent = _expanded(
                    self.first_child[level.node], self.num_children[level.node]
                )
                size += len(children)
                before = level.some(parent)
                after, marks = step(before.state, before.mark, self.byte[children])
                level = Reached(before.start, children, after, marks).some(after >= 0)
                levels.append(level)
            self._work += size
            if self._work > _MOST_WORK:
                raise TooLarge(f"it takes too much work with {self.vocab_size} tokens")
            if level.start.size:  # again, with fewer
                count = max(1, count // 8)
                continue
            yield levels
            at += len(start)
            count = int(np.clip(count * _AT_ONCE // (size + 1), 1, _MOST_STARTS))

    def _tokens_at(self, reached: Reached) -> Reached:
        """The tokens whose texts end at these nodes."""
        places, of_node = _expanded(self.first_token[reached.node], self.num_tokens[reached.node])
        return reached.some(of_node)._replace(node=self.tokens[places])


def _by_start(parts: Iterable[Reached]) -> Reached:
    """All of some parts, sorted by where they start."""
    nothing = Reached(*np.zeros((4, 0), np.int32))
    found = Reached(*map(np.concatenate, zip(nothing, *parts, strict=True)))
    return found.some(np.argsort(found.start, kind="stable"))


def _after(state: int, codes: np.ndarray) -> np.ndarray:
    """The states after tokens with these codes."""
    return np.where(codes >= ABSOLUTE, codes - ABSOLUTE, state + codes)


def _leading_to_ends(
    of_bytes: ByteAutomaton, rows: Sequence[Row], bodies: Sequence[tuple[Reached, Reached]]
) -> np.ndarray:
    """Which states lead to a text's end by tokens."""
    useful = of_bytes.accepts.copy()
    pairs = [
        (state, after) for state, _, codes in rows for after in np.unique(_after(state, codes))
    ]
    states, following = np.array(pairs, np.int64).reshape(-1, 2).T
    # Of a body, the different starts, ends and counts of its tokens.
    ways = [
        tuple(np.unique([each.start, each.state, each.mark], axis=1).T for each in both)
        for both in bodies
    ]
    before = -1
    while before < (before := useful.sum()):
        while (new := states[useful[following] & ~useful[states]]).size:
            useful[new] = True
        for body, (inside, leaving) in zip(of_bytes.bodies, ways, strict=True):
            leads = useful[body.first :][: body.leads.size].reshape(body.leads.shape)
            counts = np.arange(len(leads))
            for position, state, characters in leaving:
                in_time = body.counts_after(counts + characters) >= body.least
                leads[:, position] |= in_time & useful[state]
            for position, state, characters in inside:
                after = body.counts_after(counts + characters)
                leads[:, position] |= (after >= 0) & leads[after, state]
    return useful & of_bytes.useful


def _same_counts(body: Body, useful: np.ndarray, longest: int) -> list[np.ndarray]:
    """Groups of counts from which tokens of up to `longest` characters do the same."""
    _, kind = np.unique(useful, axis=0, return_inverse=True)
    groups: dict[tuple[int, bytes], list[int]] = collections.defaultdict(list)
    for count in reversed(range(len(useful))):
        lacking = min(max(body.least - count, 0), longest + 1)
        # The end of the counts is where fewer follow.
        groups[lacking, kind.ravel()[count : count + longest + 1].tobytes()].append(count)
    return [np.array(group[::-1]) for group in groups.values()]


def _expanded(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`first`, `first + 1`, ... of each entry, as many as its count, and the entry of each.

    Worked example: first 5 9, count 2 1 gives 5 6 9, of entries 0 0 1.
    """
    entry = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(count) - count, count)
    return first[entry] + within, entry
