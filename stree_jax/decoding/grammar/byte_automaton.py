"""Automata over the bytes of texts.

A grammar is a graph of bytes, whose long parts are bodies: texts of an automaton over characters,
such as what is between the quotes of a JSON string, with a least and a most number of characters. A
body is a table of its positions within a character (`Template`), and a count. So a string of up to
10,000 characters takes as much work as one of any length.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stree_jax.decoding.grammar.characters import (
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
_MOST_STATES = 20_000  # that are no positions of bodies
_MOST_POSITIONS = 1 << 21
_BODY = 1 << 32  # nodes from here on are positions of bodies

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

    def counts_after(self, counts: np.ndarray) -> np.ndarray:
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
        self.skip(start, len(self.bodies) * _BODY)
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
    class_of, members = _classes(graph.moves, [])
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
        if len(order) > _MOST_STATES:
            raise TooLarge(f"it needs more than {_MOST_STATES} states")
    return order, rows, class_of


def _classes(
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


class ByteAutomaton:
    """A deterministic automaton over bytes. State 0 is the start.

    Attributes:
        class_of: `[256]`, the class of each byte.
        table: `[E, classes]`, the state after a byte, of all states that are in no body.
        accepts: `[S]`, whether a text may end.
        useful: `[S]`, whether a text may end later on.
        bodies: bodies, whose states follow the others.
    """

    def __init__(
        self,
        class_of: np.ndarray,
        table: np.ndarray,
        accepts: np.ndarray,
        useful: np.ndarray,
        bodies: Sequence[Body],
    ):
        self.class_of, self.table = class_of, table
        self.accepts, self.useful, self.bodies = accepts, useful, bodies
        self._firsts = np.array([body.first for body in bodies], np.int64)
        self._ends = np.array([body.end for body in bodies], np.int64)
        self._least = np.array([body.least for body in bodies], np.int64)
        self._most = np.array([-1 if b.most is None else b.most for b in bodies], np.int64)
        self._sizes = np.array([len(body.template.after) for body in bodies], np.int64)
        # The positions of all templates, one after the other.
        templates = [*{id(body.template): body.template for body in bodies}.values()]
        places, at = {}, 0
        for template in templates:
            places[id(template)] = at
            at += len(template.after)
        self._places = np.array([places[id(body.template)] for body in bodies], np.int64)
        some = np.array([np.flatnonzero(class_of == kind)[0] for kind in range(table.shape[1])])
        self._after = np.concatenate(
            [each.after[:, each.class_of[some]] for each in templates] or [table[:0]]
        )
        self._begins = np.concatenate([each.begins for each in templates] or [np.zeros(0, bool)])
        self._may_end = np.concatenate([each.accepts for each in templates] or [np.zeros(0, bool)])

    @property
    def num_states(self) -> int:
        """Number of states, S."""
        return len(self.accepts)

    def body_of(self, states: np.ndarray) -> np.ndarray:
        """The number of the body that a state is in, -1: none."""
        return np.searchsorted(self._firsts, states, side="right") - 1

    def after(self, states: np.ndarray, byte: np.ndarray) -> np.ndarray:
        """The state after a byte each, -1: no text continues so."""
        kinds = self.class_of[byte]
        if states.max(initial=0) < len(self.table):
            return self.table[states, kinds]
        number = self.body_of(states)
        inside = number >= 0
        found = np.full(len(states), -1, np.int64)
        found[~inside] = self.table[states[~inside], kinds[~inside]]
        if inside.any():
            found[inside] = self._after_in(number[inside], states[inside], kinds[inside])
        return np.where((found >= 0) & self.useful[found], found, -1)

    def _after_in(self, number: np.ndarray, states: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        count, position = np.divmod(states - self._firsts[number], self._sizes[number])
        place, most = self._places[number] + position, self._most[number]
        after, least = self._after[place, kinds], self._least[number]
        counted = count + self._begins[place]
        counted = np.where(most < 0, np.minimum(counted, least), counted)
        stays = self._firsts[number] + counted * self._sizes[number] + after
        stays = np.where((most >= 0) & (counted > most), -1, stays)
        may_end = self._may_end[place] & (count >= least)
        ends = np.where(may_end, self.table[self._ends[number], kinds], -1)
        return np.where(after >= 0, stays, ends)

    def matches(self, text: bytes) -> bool:
        """Whether it accepts a text."""
        state = np.zeros(1, np.int64)
        for byte in text:
            state = self.after(state, np.array([byte]))
            if state[0] < 0:
                return False
        return bool(self.accepts[state[0]])


class _Determinising:
    """Makes a graph with bodies deterministic: states are sets of nodes (Rabin and Scott, 1959).

    A set that is one position of a body, and what follows it if it may end there, is a state of the
    body, and is not listed: its bytes are those of the template. That is possible where what
    follows a body begins with other bytes than the body goes on with. Else the sets are listed.
    """

    def __init__(self, graph: ByteGraph, end: int):
        self.graph, self.end = graph, end
        self.class_of, self.members = _classes(graph.moves, [b.template for b in graph.bodies])
        self.numbers: dict[frozenset[int], int] = {}
        self.order: list[frozenset[int]] = []
        self.plain: dict[int, bool] = {}  # bodies whose states are not listed
        self._moves: dict[int, dict[int, list[int]]] = {}
        self._closures: dict[frozenset[int], frozenset[int]] = {}

    def moves(self, node: int) -> dict[int, list[int]]:
        """The nodes after a node, by the class of the byte."""
        if node < _BODY:
            if node not in self._moves:
                found: dict[int, list[int]] = {}
                for (low, high), target in self.graph.moves[node]:
                    for kind in {*self.class_of[low : high + 1].tolist()}:
                        found.setdefault(kind, []).append(target)
                self._moves[node] = found
            return self._moves[node]
        which, count, position, body = self.place(node)
        after = int(body.counts_after(count + body.template.begins[position]))
        if after < 0:
            return {}
        kinds = body.template.class_of[self.members]
        row = body.template.after[position][kinds]
        size = len(body.template.after)
        base = (which + 1) * _BODY + after * size
        return {kind: [base + int(target)] for kind, target in enumerate(row) if target >= 0}

    def place(self, node: int) -> tuple[int, int, int, Body]:
        """The body of a node, its number, the count and the position there."""
        which = node // _BODY - 1
        body = self.graph.bodies[which]
        count, position = divmod(node % _BODY, len(body.template.after))
        return which, count, position, body

    def closure(self, nodes: frozenset[int]) -> frozenset[int]:
        """The nodes, and those that are joined to them: of all these, what tells texts apart."""
        if nodes not in self._closures:
            found, waiting = {*nodes}, [*nodes]
            while waiting:
                for after in self.skips(waiting.pop()):
                    if after not in found:
                        found.add(after)
                        waiting.append(after)
            self._closures[nodes] = frozenset(node for node in found if self.matters(node))
        return self._closures[nodes]

    def matters(self, node: int) -> bool:
        """Whether a node has bytes, or is the end."""
        return node >= _BODY or node == self.end or bool(self.graph.moves[node])

    def skips(self, node: int) -> list[int]:
        """The nodes that a node is joined to."""
        if node < _BODY:
            return self.graph.skips[node]
        _, count, position, body = self.place(node)
        return [body.end] if body.may_end(count, position) else []

    def state(self, nodes: frozenset[int]) -> int:
        """The number of a set of nodes, or the node of a body that it is."""
        for node in nodes:
            if node >= _BODY and self.closure(frozenset([node])) == nodes and self.is_plain(node):
                return node
        return self.listed(nodes)

    def listed(self, nodes: frozenset[int]) -> int:
        """The number of a set of nodes."""
        if nodes not in self.numbers:
            if len(self.order) == _MOST_STATES:
                raise TooLarge(f"it needs more than {_MOST_STATES} states")
            self.numbers[nodes] = len(self.order)
            self.order.append(nodes)
        return self.numbers[nodes]

    def is_plain(self, node: int) -> bool:
        """Whether the states of a node's body are not listed."""
        which, _, _, body = self.place(node)
        if which not in self.plain:
            template = body.template
            ends = template.after[template.accepts][:, template.class_of[self.members]]
            goes_on = {*np.flatnonzero((ends >= 0).any(axis=0)).tolist()}
            follows = self.closure(frozenset([body.end]))
            self.plain[which] = not any(goes_on & self.moves(each).keys() for each in follows)
            if self.plain[which]:
                self.listed(follows)
        return self.plain[which]

    def row(self, nodes: frozenset[int]) -> list[int]:
        """The state after a byte of each class."""
        after: dict[int, set[int]] = {}
        for node in nodes:
            for kind, targets in self.moves(node).items():
                after.setdefault(kind, set()).update(targets)
        row = [-1] * len(self.members)
        for kind, found in after.items():
            row[kind] = self.state(self.closure(frozenset(found)))
        return row


def automaton_of_graph(graph: ByteGraph, start: int, end: int) -> ByteAutomaton | None:
    """The automaton of the texts between two nodes; None: there is no such text.

    Raises:
        TooLarge: it needs too many states.
    """
    work = _Determinising(graph, end)
    work.listed(work.closure(frozenset([start])))
    rows = [work.row(nodes) for nodes in work.order]  # it grows meanwhile
    used = [which for which, plain in work.plain.items() if plain]
    bodies, first = [], len(rows)
    for which in used:
        body = graph.bodies[which]
        end_state = work.numbers[work.closure(frozenset([body.end]))]
        bodies.append(body._replace(first=first, end=end_state))
        first += body.num_states
        if first > _MOST_POSITIONS:
            raise TooLarge(f"it needs more than {_MOST_POSITIONS} states")
    number_of = {which: i for i, which in enumerate(used)}
    table = np.full((len(rows), len(work.members)), -1, np.int64)
    for state, row in enumerate(rows):
        for kind, target in enumerate(row):
            if target >= _BODY:
                target = bodies[number_of[target // _BODY - 1]].first + target % _BODY
            table[state, kind] = target
    accepts = np.array([end in nodes for nodes in work.order])
    accepts, useful = _ends(table, accepts, bodies)
    if not useful[0]:
        return None
    table = np.where((table >= 0) & useful[table], table, -1)
    return ByteAutomaton(work.class_of, table, accepts, useful, bodies)


def _ends(
    table: np.ndarray, accepts: np.ndarray, bodies: Sequence[Body]
) -> tuple[np.ndarray, np.ndarray]:
    """Which states a text may end in, and which it may end after, those of bodies with them."""
    num_listed = len(table)
    inside = [_can_end(body) for body in bodies]
    may_end = [
        (np.arange(body.last_count + 1)[:, None] >= body.least) & body.template.accepts
        for body in bodies
    ]
    # From the ends backwards; a body counts as one state.
    before: list[list[int]] = [[] for _ in range(num_listed + len(bodies))]
    firsts = np.array([body.first for body in bodies], np.int64)
    for state, targets in enumerate(table):
        for target in {*targets.tolist()} - {-1}:
            if target < num_listed:
                before[target].append(state)
                continue
            which = int(np.searchsorted(firsts, target, side="right")) - 1
            if inside[which].ravel()[target - firsts[which]]:
                before[num_listed + which].append(state)
    for which, body in enumerate(bodies):
        before[body.end].append(num_listed + which)
    waiting = np.flatnonzero(accepts).tolist()
    useful = np.zeros(len(before), bool)
    useful[waiting] = True
    while waiting:
        new = [state for state in before[waiting.pop()] if not useful[state]]
        useful[new] = True
        waiting += new
    parts = zip(bodies, inside, may_end, strict=True)
    both = [
        (ends.ravel() & accepts[body.end], leads.ravel() & useful[num_listed + which])
        for which, (body, leads, ends) in enumerate(parts)
    ]
    return (
        np.concatenate([accepts, *(ends for ends, _ in both)]),
        np.concatenate([useful[:num_listed], *(leads for _, leads in both)]),
    )


def _can_end(body: Body) -> np.ndarray:
    """Whether a body may end later on, `[counts, positions]`: from the last count backwards."""
    template, last = body.template, body.last_count
    leads = np.zeros((last + 2, len(template.after)), bool)  # beyond the last count: nothing
    goes_on, target = template.after >= 0, np.maximum(template.after, 0)
    count = last
    while count >= 0:
        row = template.accepts & (count >= body.least)
        stops_counting = body.most is None and count == last
        while True:
            more = row if stops_counting else leads[count + 1]
            of_next = np.where(template.begins[:, None], more[target], row[target])
            new = row | (of_next & goes_on).any(axis=1)
            if (new == row).all():
                break
            row = new
        leads[count] = row
        if count < last and (row == leads[count + 1]).all():  # so are the lower counts
            until = body.least if count >= body.least else 0
            leads[until:count] = row
            count = until
        count -= 1
    return leads[:-1]


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
