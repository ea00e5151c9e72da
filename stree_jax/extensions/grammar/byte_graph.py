"""Graphs of bytes: what a grammar is made of.

Their long parts are bodies: texts of an automaton over characters, such as what is between the
quotes of a JSON string, with a least and a most number of characters. A body is a table of its
positions within a character (`Template`), and a count. So a string of up to 10,000 characters takes
as much work as one of any length.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stree_jax.extensions.grammar.characters import (
    Characters,
    Choice,
    Expression,
    Ranges,
    Repeat,
    Sequence_,
    TextAutomaton,
    TooLarge,
    automaton_of,
    ranges_of,
)

MOST_NODES = 200_000  # of a graph
MOST_STATES = 20_000  # that are no positions of bodies
BODY = 1 << 32  # nodes from here on are positions of bodies

ByteRange = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """The positions of a body, and what bytes do there, whatever the count. Position 0 is first.

    Attributes:
        class_of: `[256]`, the class of each byte; bytes of a class are not told apart.
        after: `[P, classes]`, the position after a byte, -1: no text continues so.
        begins: `[P]`, whether the next byte begins a character.
        accepts: `[P]`, whether the body may end.
    """

    class_of: np.ndarray
    after: np.ndarray
    begins: np.ndarray
    accepts: np.ndarray


class Body(NamedTuple):
    """A body in a graph. It has a state for each count of characters and each position.

    Attributes:
        template: its positions.
        least, most: of characters; `most` None: without limit, and counts stop at `least`.
        end: what follows it, a node of the graph or a state of the automaton.
        first: its first state in the automaton.
    """

    template: Template
    least: int
    most: int | None
    end: int
    first: int = 0

    @property
    def last_count(self) -> int:
        """The largest count."""
        return self.least if self.most is None else self.most

    @property
    def num_states(self) -> int:
        """Counts times positions."""
        return (self.last_count + 1) * len(self.template.after)

    def counts_after(self, counts: np.ndarray | np.integer) -> np.ndarray | np.integer:
        """What is kept of numbers of characters; -1: too many."""
        if self.most is None:
            return np.minimum(counts, self.least)
        return np.where(counts <= self.most, counts, -1)

    def may_end(self, count: int, position: int) -> bool:
        """Whether the body may end."""
        return bool(self.template.accepts[position]) and count >= self.least


class ByteGraph:
    """A nondeterministic automaton over bytes. Each method adds a part after a node."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[ByteRange, int]]] = []
        self.skips: list[list[int]] = []
        self.bodies: list[Body] = []

    def node(self) -> int:
        """A new node."""
        if len(self.moves) == MOST_NODES:
            raise TooLarge(f"it needs more than {MOST_NODES} parts")
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
        """The texts that an expression without anchors matches; `quoted` as in `characters`."""
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
            case Repeat(Characters() as unit, least, most) if (most or least) > 1:
                automaton = automaton_of(Repeat(unit, 0, None))
                return self.body(start, template_of(automaton, quoted=quoted), least, most)
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
        assert isinstance(expression, Characters)
        end = self.node()
        self._add(start, expression.ranges, end, {}, quoted=quoted)
        return end

    def characters(self, start: int, automaton: TextAutomaton, *, quoted: bool = False) -> int:
        """Texts of an automaton over characters; `quoted`: as JSON writes them in a string."""
        states = [self.node() for _ in automaton.next_state]
        end = self.node()
        self.skip(start, states[0])
        tails: dict[tuple[int, tuple[ByteRange, ...]], int] = {}
        ranges = automaton.ranges()
        for state, row, may_end in zip(
            states, automaton.next_state, automaton.accepts, strict=True
        ):
            if may_end:
                self.skip(state, end)
            for after in {*row} - {-1}:
                kinds = [kind for kind, target in enumerate(row) if target == after]
                together = ranges_of(pair for kind in kinds for pair in ranges[kind])
                self._add(state, together, states[after], tails, quoted=quoted)
        return end

    def _add(
        self,
        start: int,
        ranges: Ranges,
        end: int,
        tails: dict[tuple[int, tuple[ByteRange, ...]], int],
        *,
        quoted: bool,
    ) -> None:
        """One of some characters; `tails` are nodes where last bytes of characters begin."""
        for sequence in _quoted(ranges) if quoted else _utf8(ranges):
            node = start
            for i, byte in enumerate(sequence):
                tail = sequence[i + 1 :]
                if tail and (end, tail) not in tails:
                    tails[end, tail] = self.node()
                target = tails[end, tail] if tail else end
                self.moves[node].append((byte, target))
                node = target

    def body(self, start: int, template: Template, least: int = 0, most: int | None = None) -> int:
        """A body; returns the node after it."""
        end = self.node()
        self.bodies.append(Body(template, least, most, end))
        self.skip(start, len(self.bodies) * BODY)
        return end


@functools.lru_cache(maxsize=256)
def template_of(automaton: TextAutomaton, *, quoted: bool = False) -> Template:
    """The template of the texts of an automaton; `quoted`: as JSON writes them in a string.

    Raises:
        ValueError: it needs too many states.
    """
    graph = ByteGraph()
    graph.characters(graph.node(), automaton, quoted=quoted)
    between = {1 + state: may_end for state, may_end in enumerate(automaton.accepts)}
    order, rows, classes = _determinised(graph, 1)
    marks = [state & between.keys() for state in order]
    return Template(
        classes,
        np.array(rows, np.int32),
        np.array([bool(found) for found in marks]),
        np.array([any(between[node] for node in found) for found in marks]),
    )


def _determinised(
    graph: ByteGraph, start: int
) -> tuple[list[frozenset[int]], list[list[int]], np.ndarray]:
    """The states of a graph without bodies and skips, their rows, and the class of each byte."""
    class_of, members = byte_classes(graph.moves, [])
    numbers = {frozenset([start]): 0}
    order, rows = [*numbers], []
    for state in order:
        after: list[set[int]] = [set() for _ in members]
        for node in state:
            for (low, high), target in graph.moves[node]:
                for kind in {*class_of[low : high + 1].tolist()}:
                    after[kind].add(target)
        row = []
        for targets in map(frozenset, after):
            if targets and targets not in numbers:
                numbers[targets] = len(order)
                order.append(targets)
            row.append(numbers[targets] if targets else -1)
        rows.append(row)
        if len(order) > MOST_STATES:
            raise TooLarge(f"it needs more than {MOST_STATES} states")
    return order, rows, class_of


def byte_classes(
    moves: Iterable[Iterable[tuple[ByteRange, int]]], templates: Sequence[Template]
) -> tuple[np.ndarray, list[int]]:
    """The class of each byte, and a byte of each class."""
    ranges = sorted({byte for each in moves for byte, _ in each})
    marks = [*(template.class_of for template in templates)]
    for low, high in ranges:
        mark = np.zeros(256, np.int32)
        mark[low : high + 1] = 1
        marks.append(mark)
    table = np.stack(marks) if marks else np.zeros((1, 256), np.int32)
    _, members, class_of = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return class_of.ravel(), members.tolist()


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


_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


def _quoted(ranges: Ranges) -> Iterator[tuple[ByteRange, ...]]:
    """The bytes of characters in a JSON string; each character is written in one way."""
    for low, high in ranges:
        for code in [*range(low, min(high, 0x1F) + 1), 0x22, 0x5C]:
            if low <= code <= high:
                text = _ESCAPES.get(chr(code), f"\\u{code:04x}")
                yield tuple((byte, byte) for byte in text.encode())
        for start, end in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)):
            yield from _utf8(
                ranges_of([(max(low, start), min(high, end))])
                if low <= end and high >= start
                else ()
            )
