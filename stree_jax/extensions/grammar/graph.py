"""Automata over the bytes of texts in UTF-8.

A `Graph` is a nondeterministic automaton (Thompson, 1968), and `Determinised` a deterministic one.
Sets of texts are `TextSet`, which can be joined and subtracted. The long parts of a grammar are
bodies: texts of a set, such as what is between the quotes of a JSON string, with a least and a most
number of characters. A body is a table of its positions, and a count. So a string of up to 10,000
characters takes as much work as one of any length.
"""

import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stree_jax.extensions.grammar.expressions import (
    ANY_TEXT,
    Characters,
    Choice,
    Edge,
    Expression,
    Ranges,
    Repeat,
    Sequence_,
)

MOST_NODES = 200_000  # of a graph
MOST_STATES = 20_000  # that are no positions of bodies
BODY = 1 << 32  # nodes from here on are positions of bodies
_MOST_NODES_OF_SET = 50_000
_MOST_ROUNDS = 64

ByteRange = tuple[int, int]


class TooLarge(ValueError):
    """A grammar needs too many states; what made it says which part."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextSet:
    """A set of texts: a deterministic automaton over their bytes. State 0 is the start.

    Attributes:
        class_of: `[256]`, the class of each byte; bytes of a class are not told apart.
        after: `[S, classes]`, the state after a byte, -1: no text continues so.
        accepts: `[S]`, whether a text may end.
        begins: `[S]`, whether the next byte begins a character.
    """

    class_of: np.ndarray
    after: np.ndarray
    accepts: np.ndarray
    begins: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def key(self) -> tuple[bytes, ...]:
        """What tells automata apart."""
        return self.class_of.tobytes(), self.after.tobytes(), self.accepts.tobytes()

    @property
    def is_empty(self) -> bool:
        """Whether there is no text."""
        return not self.accepts.any()

    def matches(self, text: str) -> bool:
        """Whether a text is one of them."""
        state = 0
        for byte in text.encode():
            state = self.after[state, self.class_of[byte]]
            if state < 0:
                return False
        return bool(self.accepts[state])

    def __and__(self, other: "TextSet") -> "TextSet":
        """The texts that are in both."""
        return _product(self, other, is_in_both=True)

    def __sub__(self, other: "TextSet") -> "TextSet":
        """The texts that are not in the other."""
        return _product(self, other, is_in_both=False)


def _product(a: TextSet, b: TextSet, *, is_in_both: bool) -> TextSet:
    """Runs two automata in parallel: a state is a pair. The first must not fail."""
    num_classes = b.after.shape[1]
    _, some, class_of = np.unique(
        a.class_of * num_classes + b.class_of, return_index=True, return_inverse=True
    )
    failed = len(b.after)
    of_a, of_b = a.after[:, a.class_of[some]], np.full((failed + 1, len(some)), -1)
    of_b[:failed] = b.after[:, b.class_of[some]]

    def after(pairs: np.ndarray) -> np.ndarray:
        first, second = of_a[pairs // (failed + 1)], of_b[pairs % (failed + 1)]
        ends = (first < 0) | (second < 0) & is_in_both
        return np.where(ends, -1, first * (failed + 1) + np.where(second < 0, failed, second))

    pairs = new = np.zeros(1, np.int64)
    while new.size:
        new = np.setdiff1d(after(new), np.append(pairs, -1))
        pairs = np.union1d(pairs, new)
        check_states(len(pairs))
    following = after(pairs)
    of_first, of_second = pairs // (failed + 1), pairs % (failed + 1)
    return minimal(
        class_of.ravel(),
        np.where(following < 0, -1, np.searchsorted(pairs, following)),
        a.accepts[of_first] & (np.append(b.accepts, False)[of_second] == is_in_both),
        a.begins[of_first],
    )


def minimal(
    class_of: np.ndarray, after: np.ndarray, accepts: np.ndarray, begins: np.ndarray
) -> TextSet:
    """The set of an automaton, without states that lead to no end, and without equal states.

    Equal states are found by Moore (1956). Long chains would take too many rounds, and are left as
    they are.
    """
    useful = sorted(leading_to(np.flatnonzero(accepts).tolist(), enumerate(after.tolist())))
    number = np.full(len(after) + 1, -1)  # the last is that of -1
    number[useful] = np.arange(len(useful))
    useful = useful or [0]
    after, accepts, begins = number[after[useful]], accepts[useful], begins[useful]
    group, count = 2 * accepts + begins, 0
    for _ in range(_MOST_ROUNDS):
        keys = np.column_stack([group, np.append(group, -1)[after]])
        _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        group = np.argsort(np.argsort(first))[group.ravel()]  # in the order of the states
        if len(first) == count:
            break
        count = len(first)
    else:
        first = group = np.arange(len(after))
    first = np.sort(first)
    after = np.append(group, -1)[after[first]]
    _, some, kinds = np.unique(after, axis=1, return_index=True, return_inverse=True)
    return TextSet(kinds.ravel()[class_of], after[:, some], accepts[first], begins[first])


def leading_to(ends: Iterable[int], ways: Iterable[tuple[int, Iterable[int]]]) -> set[int]:
    """The nodes from which a way leads to an end; `ways` are nodes, and those after each."""
    before: dict[int, list[int]] = defaultdict(list)
    for node, targets in ways:
        for target in {*targets}:
            before[target].append(node)
    found = {*ends}
    waiting = [*found]
    while waiting:
        new = [node for node in before[waiting.pop()] if node not in found]
        found.update(new)
        waiting += new
    return found


def check_states(count: int) -> None:
    """Refuses an automaton with too many states."""
    if count > MOST_STATES:
        raise TooLarge(f"it needs more than {MOST_STATES} states")


class Body(NamedTuple):
    """A body in a graph. It has a state for each count of characters and each position.

    Attributes:
        texts: its texts of any length, whose states are its positions.
        least: of characters, for it to end.
        last: the last count.
        beyond: the count of more characters: `last` without an upper limit, else -1, too many.
        end: what follows it, a node of the graph or a state of the automaton.
        leads: whether it may end later on, `[counts, positions]`.
        first: its first state in the automaton.
    """

    texts: TextSet
    least: int
    last: int
    beyond: int
    end: int
    leads: np.ndarray
    first: int = 0

    def counts_after(self, characters: Any) -> Any:
        """The counts of numbers of characters; -1: too many."""
        return np.where(characters > self.last, self.beyond, characters)


@functools.lru_cache(maxsize=256)
def _leads(texts: TextSet, least: int, last: int, beyond: int) -> np.ndarray:
    """See `Body.leads`: from the last count backwards."""
    leads = np.zeros((last + 2, len(texts.after)), bool)  # beyond the last count: nothing
    goes_on, target = texts.after >= 0, np.maximum(texts.after, 0)
    count = last
    while count >= 0:
        row = texts.accepts & (count >= least)
        while True:
            more = row if count == beyond else leads[count + 1]
            of_next = np.where(texts.begins[:, None], more[target], row[target])
            new = row | (of_next & goes_on).any(axis=1)
            if (new == row).all():
                break
            row = new
        leads[count] = row
        if count < last and (row == leads[count + 1]).all():  # so are the lower counts
            until = least if count >= least else 0
            leads[until:count] = row
            count = until
        count -= 1
    return leads[:-1]


class Graph:
    """A nondeterministic automaton over bytes. Each method adds a part after a node.

    Args:
        is_of_set: whether it is for a `TextSet`, which has no bodies.
    """

    def __init__(self, *, is_of_set: bool = False) -> None:
        self.moves: list[list[tuple[ByteRange, int]]] = []
        self.skips: list[list[int]] = []
        # By node whether an anchor is the start, and what follows.
        self.anchors: dict[int, list[tuple[bool, int]]] = defaultdict(list)
        self.bodies: list[Body] = []
        self.inside: set[int] = set()  # nodes within characters
        self._is_of_set = is_of_set
        self._tails: dict[tuple[int, tuple[ByteRange, ...]], int] = {}  # last bytes of characters

    def node(self) -> int:
        """A new node."""
        most = _MOST_NODES_OF_SET if self._is_of_set else MOST_NODES
        if len(self.moves) == most:
            raise TooLarge(
                f"it needs more than {most} parts, counted with repeats; at most as many are"
                " possible"
            )
        self.moves.append([])
        self.skips.append([])
        return len(self.moves) - 1

    def skip(self, start: int, end: int) -> None:
        """Joins two nodes."""
        self.skips[start].append(end)

    def text(self, start: int, text: str) -> int:
        """A given text; returns the node after it."""
        for byte in text.encode():
            end = self.node()
            self.moves[start].append(((byte, byte), end))
            start = end
        return start

    def expression(self, start: int, expression: Expression, *, quoted: bool = False) -> int:
        """The texts that an expression matches; `quoted`: as JSON writes them in a string."""
        match expression:
            case Sequence_(parts):
                for part in parts:
                    start = self.expression(start, part, quoted=quoted)
                return start
            case Choice(parts):
                end = self.node()
                for part in parts:
                    self.skip(self.expression(start, part, quoted=quoted), end)
                return end
            case Repeat(Characters() as unit, least, most) if (
                most or least
            ) > 1 and not self._is_of_set:
                texts = set_of(Repeat(unit, 0, None))
                return self.body(start, quoted_set(texts) if quoted else texts, least, most)
            case Repeat(part, least, most):
                for _ in range(least):
                    start = self.expression(start, part, quoted=quoted)
                end = self.node()
                self.skip(start, end)
                if most is None:  # apart, so that a part that is empty does not leave the loop
                    loop = self.node()
                    self.skip(start, loop)
                    start = self.expression(loop, part, quoted=quoted)
                    self.skip(start, loop)
                    self.skip(start, end)
                    return end
                for _ in range(most - least):
                    start = self.expression(start, part, quoted=quoted)
                    self.skip(start, end)
                return end
        end = self.node()
        match expression:
            case Characters(ranges):
                self._add(start, _utf8(ranges), end, quoted=quoted)
            case Edge(is_start):
                self.anchors[start].append((is_start, end))
        return end

    def texts(self, start: int, texts: TextSet, *, quoted: bool = False) -> int:
        """The texts of a set; `quoted`: as JSON writes them in a string."""
        states = [self.node() for _ in texts.after]
        self.inside.update(states[i] for i in np.flatnonzero(~texts.begins))
        end = self.node()
        self.skip(start, states[0])
        for state, row in zip(states, texts.after[:, texts.class_of], strict=True):
            lows = np.flatnonzero(np.diff(row, prepend=-2)).tolist()
            for low, after in zip(lows, [*lows[1:], 256], strict=True):
                if row[low] >= 0:
                    self._add(state, [((low, after - 1),)], states[row[low]], quoted=quoted)
        for i in np.flatnonzero(texts.accepts):
            self.skip(states[i], end)
        return end

    def _add(
        self, start: int, sequences: Iterable[tuple[ByteRange, ...]], end: int, *, quoted: bool
    ) -> None:
        """Sequences of bytes; what several have last is there once."""
        for sequence in _quoted(sequences) if quoted else sequences:
            node = start
            for i, byte in enumerate(sequence):
                target, tail = end, (end, sequence[i + 1 :])
                if tail[1]:
                    if tail not in self._tails:
                        self._tails[tail] = self.node()
                        self.inside.add(self._tails[tail])
                    target = self._tails[tail]
                self.moves[node].append((byte, target))
                node = target

    def body(self, start: int, texts: TextSet, least: int = 0, most: int | None = None) -> int:
        """A body; returns the node after it."""
        end = self.node()
        counts = (least, least, least) if most is None else (least, most, -1)
        self.bodies.append(Body(texts, *counts, end, _leads(texts, *counts)))
        self.skip(start, len(self.bodies) * BODY)
        return end


class Determinised:
    """The texts between two nodes of a graph: states are sets of nodes (Rabin and Scott, 1959).

    A set that is one position of a body, and what follows it if it may end there, is a state of the
    body, and is not listed: its bytes are those of the body's texts. That is possible where what
    follows a body begins with other bytes than the body goes on with. Else the sets are listed.

    Attributes:
        class_of: `[256]`, the class of each byte.
        members: a byte of each class.
        is_empty: whether there is no text.
        order: the sets that are listed, that of the start first.
        rows: of each of these the state after a byte of each class, -1: none.
        accepts: of each of these whether a text may end.
        plain: bodies whose states are not listed.
    """

    def __init__(self, graph: Graph, start: int, end: int):
        self.graph, self.end = graph, end
        self.class_of, self.members = _byte_classes(graph)
        self.order: list[frozenset[int]] = []
        self.rows: list[list[int]] = []
        self.accepts: list[bool] = []
        self.plain: dict[int, bool] = {}
        self._numbers: dict[frozenset[int], int] = {}
        self._moves: dict[int, dict[int, list[int]]] = {}
        self._closures: dict[Any, frozenset[int]] = {}
        self._useful = leading_to([end], self._ways())
        self.is_empty = start not in self._useful
        self.listed(self.closure([start], at_start=True))
        if graph.anchors:  # no other place is the start of the text
            self._numbers.clear()
        for nodes in self.order:  # it grows meanwhile
            ends = self.closure(nodes, at_start=not self.rows, at_end=True)
            self.accepts.append(end in ends)
            self.rows.append(self._row(nodes))

    def _ways(self) -> Iterator[tuple[int, Iterable[int]]]:
        graph = self.graph
        for node, moves in enumerate(graph.moves):
            others = (target for _, target in (*moves, *graph.anchors.get(node, ())))
            yield node, (*graph.skips[node], *others)
        for which, body in enumerate(graph.bodies):
            yield (which + 1) * BODY, [body.end] if body.leads[0, 0] else []

    def _place(self, node: int) -> tuple[int, int, int, Body]:
        """The number of a body's node, the count and the position there, and the body."""
        which = node // BODY - 1
        body = self.graph.bodies[which]
        return which, *divmod(node % BODY, len(body.texts.after)), body

    def _moves_of(self, node: int) -> dict[int, list[int]]:
        """The nodes after a node, by the class of the byte."""
        if node >= BODY:
            which, count, position, body = self._place(node)
            texts, after = body.texts, int(body.counts_after(count + body.texts.begins[position]))
            row = texts.after[position, texts.class_of[self.members]]
            base = (which + 1) * BODY + after * len(texts.after)
            leads = body.leads[after] if after >= 0 else np.zeros(len(texts.after), bool)
            kinds = np.flatnonzero((row >= 0) & leads[row])
            return {int(kind): [base + int(row[kind])] for kind in kinds}
        if node not in self._moves:
            found: dict[int, list[int]] = {}
            for (low, high), target in self.graph.moves[node]:
                if target in self._useful:
                    for kind in {*self.class_of[low : high + 1].tolist()}:
                        found.setdefault(kind, []).append(target)
            self._moves[node] = found
        return self._moves[node]

    def closure(
        self, nodes: Iterable[int], *, at_start: bool = False, at_end: bool = False
    ) -> frozenset[int]:
        """The nodes, and those that are joined to them: of all these, what tells texts apart."""
        key = frozenset(nodes), at_start, at_end
        if key not in self._closures:
            found, waiting = {*nodes}, [*nodes]
            while waiting:
                for after in self._skips(waiting.pop(), at_start, at_end):
                    if after not in found and after in self._useful:
                        found.add(after)
                        waiting.append(after)
            # What has no bytes, and does not wait for the end, was only passed.
            moves, anchors = self.graph.moves, self.graph.anchors
            self._closures[key] = frozenset(
                node
                for node in found
                if node >= BODY or moves[node] or node == self.end or node in anchors
            )
        return self._closures[key]

    def _skips(self, node: int, at_start: bool, at_end: bool) -> list[int]:
        """The nodes that a node is joined to."""
        if node >= BODY:
            _, count, position, body = self._place(node)
            return [body.end] if body.texts.accepts[position] and count >= body.least else []
        anchors = self.graph.anchors.get(node, ())
        passed = (after for is_start, after in anchors if (at_start if is_start else at_end))
        return [*self.graph.skips[node], *passed]

    def listed(self, nodes: frozenset[int]) -> int:
        """The number of a set of nodes."""
        if nodes not in self._numbers:
            self._numbers[nodes] = len(self.order)
            self.order.append(nodes)
            check_states(len(self.order))
        return self._numbers[nodes]

    def _is_plain(self, node: int) -> bool:
        """Whether the states of a node's body are not listed."""
        which, _, _, body = self._place(node)
        if which not in self.plain:
            texts = body.texts
            ends = texts.after[texts.accepts][:, texts.class_of[self.members]]
            goes_on = {*np.flatnonzero((ends >= 0).any(axis=0)).tolist()}
            follows = self.closure([body.end])
            self.plain[which] = not any(goes_on & self._moves_of(each).keys() for each in follows)
            if self.plain[which]:
                self.listed(follows)
        return self.plain[which]

    def _row(self, nodes: frozenset[int]) -> list[int]:
        """The state after a byte of each class: a number, or the node of a body that it is."""
        after: dict[int, set[int]] = {}
        for node in nodes:
            for kind, targets in self._moves_of(node).items():
                after.setdefault(kind, set()).update(targets)
        row = [-1] * len(self.members)
        for kind, found in after.items():
            state = self.closure(found)
            in_body = (
                node
                for node in state
                if node >= BODY and self.closure([node]) == state and self._is_plain(node)
            )
            row[kind] = next(in_body, -1)
            if row[kind] < 0:
                row[kind] = self.listed(state)
        return row


def _byte_classes(graph: Graph) -> tuple[np.ndarray, list[int]]:
    """The class of each byte, and a byte of each class."""
    marks = [np.zeros(256, np.int64)]
    marks += [texts.class_of for texts in dict.fromkeys(body.texts for body in graph.bodies)]
    for low, high in sorted({byte for moves in graph.moves for byte, _ in moves}):
        marks.append(np.zeros(256, np.int64))
        marks[-1][low : high + 1] = 1
    _, members, class_of = np.unique(marks, axis=1, return_index=True, return_inverse=True)
    return class_of.ravel(), members.tolist()


@functools.lru_cache(maxsize=256)
def set_of(expression: Expression) -> TextSet:
    """The texts that an expression matches as a whole.

    Raises:
        TooLarge: it needs too many states.
    """
    graph = Graph(is_of_set=True)
    start = graph.node()
    return _set(graph, start, graph.expression(start, expression))


@functools.lru_cache(maxsize=256)
def quoted_set(texts: TextSet) -> TextSet:
    """The texts of a set as JSON writes them in a string."""
    graph = Graph(is_of_set=True)
    start = graph.node()
    return _set(graph, start, graph.texts(start, texts, quoted=True))


def _set(graph: Graph, start: int, end: int) -> TextSet:
    """The texts between two nodes."""
    found = Determinised(graph, start, end)
    begins = np.array([not nodes <= graph.inside for nodes in found.order])
    return minimal(found.class_of, np.array(found.rows), np.array(found.accepts), begins)


def _utf8(ranges: Ranges) -> Iterator[tuple[ByteRange, ...]]:
    """The bytes of characters, as sequences of ranges."""
    for low, high in ranges:
        for start, limit in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if low <= limit and high >= start:
                yield from _of_one_length(max(low, start), min(high, limit))


def _of_one_length(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    """Those of characters with equally many bytes.

    Worked example: U+0800 to U+1FFF is E0 A0-BF 80-BF, and then E1 80-BF 80-BF.
    """
    size = len(chr(low).encode())
    for shift in range(6, 6 * size, 6):
        mask = (1 << shift) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from _of_one_length(low, low | mask)
                yield from _of_one_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _of_one_length(low, (high & ~mask) - 1)
                yield from _of_one_length(high & ~mask, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


_ESCAPES = {code: json.dumps(chr(code))[1:-1].encode() for code in (*range(0x20), 0x22, 0x5C)}


def _quoted(sequences: Iterable[tuple[ByteRange, ...]]) -> Iterator[tuple[ByteRange, ...]]:
    """The bytes in a JSON string; each character is written in one way."""
    for first, *others in sequences:
        low, high = first
        if others or low >= 0x80:
            yield first, *others
            continue
        for code in _ESCAPES:
            if low <= code <= high:
                yield tuple((byte, byte) for byte in _ESCAPES[code])
        for start, end in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xFF)):
            if low <= end and high >= start:
                yield ((max(low, start), min(high, end)),)


ANYTHING = set_of(ANY_TEXT)
