"""Nondeterministic automata over the bytes of texts in UTF-8 (Thompson, 1968).

Nodes are numbered as they are made, so that copies of a part have the same distances inside; a node
that several parts lead to is made after them.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from stree_jax.extensions.grammar.expressions import (
    Characters,
    Choice,
    Expression,
    Ranges,
    Repeat,
    Series,
    any_text,
    inverted,
    literal,
    of_characters,
)

MOST_NODES = 100_000

ByteRange = tuple[int, int]


class TooLarge(ValueError):
    """A grammar needs too many states; what made it says which part."""


class Graph:
    """An automaton that grows: each method adds a part after a node."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[ByteRange, int]]] = [[]]  # by node, the first is the start
        self.skips: list[list[int]] = [[]]  # by node those that a skip leads to
        self._tails: dict[tuple[int, tuple[ByteRange, ...]], int] = {}  # last bytes of characters

    def node(self, *sources: int) -> int:
        """Makes a node, to which skips lead from others."""
        new = len(self.moves)
        if new >= MOST_NODES:
            raise TooLarge(f"it needs more than {MOST_NODES} parts, counted with repeats")
        self.moves.append([])
        self.skips.append([])
        for source in sources:
            self.skips[source].append(new)
        return new

    def text(self, start: int, text: str) -> int:
        """Adds a given text; returns the node after it."""
        return self.expression(start, literal(text))

    def expression(self, start: int, expression: Expression, *, quoted: bool = False) -> int:
        """Adds what an expression matches, as in a JSON string if `quoted`."""
        match expression:
            case Characters(ranges):
                end = self.node()
                self._characters(start, ranges, end, quoted=quoted)
                return end
            case Series(parts):
                for part in parts:
                    start = self.expression(start, part, quoted=quoted)
                return start
            case Choice(parts):
                return self.node(*[self.expression(start, part, quoted=quoted) for part in parts])
            case Repeat(part, least, most):
                for _ in range(least):
                    start = self.expression(start, part, quoted=quoted)
                if most is None:  # a node apart, which nothing leads to but the loop
                    loop = self.node(start)
                    self.skips[self.expression(loop, part, quoted=quoted)].append(loop)
                    return self.node(loop)
                ends = [start]
                for _ in range(most - least):
                    ends.append(self.expression(ends[-1], part, quoted=quoted))
                return self.node(*ends)

    def all_of(self, start: int, parts: Sequence[Expression], *, quoted: bool = False) -> int:
        """Adds what all of some expressions match: nodes for pairs of nodes."""
        if len(parts) == 1:
            return self.expression(start, parts[0], quoted=quoted)
        first, second = Graph(), Graph()
        end_of_first = first.expression(0, parts[0], quoted=quoted)
        end_of_second = second.all_of(0, parts[1:], quoted=quoted)
        nodes, waiting = {(0, 0): start}, [(0, 0)]

        def node(pair: tuple[int, int]) -> int:
            if pair not in nodes:
                nodes[pair] = self.node()
                waiting.append(pair)
            return nodes[pair]

        for a, b in waiting:  # it grows meanwhile
            here = nodes[a, b]
            self.skips[here] += [node((after, b)) for after in first.skips[a]]
            self.skips[here] += [node((a, after)) for after in second.skips[b]]
            for (low, high), to_a in first.moves[a]:
                for (least, most), to_b in second.moves[b]:
                    byte = max(low, least), min(high, most)
                    if byte[0] <= byte[1]:
                        self.moves[here].append((byte, node((to_a, to_b))))
        return node((end_of_first, end_of_second))

    def other_than(self, start: int, names: Collection[str]) -> int:
        """Adds texts in a JSON string that are none of some names."""
        if not names:
            return self.expression(start, any_text(), quoted=True)
        free = self.node()
        ends = [self.expression(free, any_text(), quoted=True)]

        def beside(node: int, names: Collection[str]) -> None:
            by_first: dict[str, list[str]] = defaultdict(list)
            for name in names:
                if name:
                    by_first[name[0]].append(name[1:])
            self._characters(node, inverted(of_characters(by_first)), free, quoted=True)
            for first, names_after in by_first.items():
                after = self.node()
                self._characters(node, of_characters(first), after, quoted=True)
                beside(after, names_after)
            if "" not in names:
                ends.append(node)

        beside(start, names)
        return self.node(*ends)

    def _characters(self, start: int, ranges: Ranges, end: int, *, quoted: bool) -> None:
        """Adds characters; last bytes in common are there once."""
        for sequence in _sequences(ranges, quoted):
            node = start
            for i, byte in enumerate(sequence):
                target, tail = end, (end, sequence[i + 1 :])
                if tail[1]:
                    if tail not in self._tails:
                        self._tails[tail] = self.node()
                    target = self._tails[tail]
                self.moves[node].append((byte, target))
                node = target

    def leading_to(self, end: int) -> set[int]:
        """Returns the nodes from which a way leads to the end."""
        both = zip(self.moves, self.skips, strict=True)
        ways = ({*skips, *(to for _, to in moves)} for moves, skips in both)
        return leading_to([end], enumerate(ways))


def leading_to(ends: Iterable[int], ways: Iterable[tuple[int, Iterable[int]]]) -> set[int]:
    """Returns the nodes that lead to an end by `ways`, from each."""
    before: dict[int, list[int]] = defaultdict(list)
    for node, targets in ways:
        for target in targets:
            before[target].append(node)
    reached = {*ends}
    waiting = [*reached]
    while waiting:
        new = [node for node in before[waiting.pop()] if node not in reached]
        reached.update(new)
        waiting += new
    return reached


def have_a_text(parts: tuple[Expression, ...]) -> bool:
    """True if some text matches all of some expressions."""
    graph = Graph()
    return not parts or 0 in graph.leading_to(graph.all_of(0, parts))


@functools.lru_cache(maxsize=1024)
def _sequences(ranges: Ranges, quoted: bool) -> list[tuple[ByteRange, ...]]:
    """Returns the bytes of characters, as sequences of ranges."""
    sequences: list[tuple[ByteRange, ...]] = []
    for low, high in ranges:
        for start, limit in ((0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if low <= limit and high >= start:
                sequences += _of_one_length(max(low, start), min(high, limit))
        if quoted:  # in a JSON string, each in one way; few control characters are there
            escapes = (_ESCAPES[code] for code in _ESCAPES if low <= code <= high)
            sequences += (tuple((byte, byte) for byte in escape) for escape in escapes)
        for start, limit in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)) if quoted else ((0, 0x7F),):
            if low <= limit and high >= start:
                sequences.append(((max(low, start), min(high, limit)),))
    return sequences


_ESCAPES = {code: json.dumps(chr(code))[1:-1].encode() for code in b'\b\f\n\r\t"\\'}


def _of_one_length(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    """Yields those of characters with equally many bytes.

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
