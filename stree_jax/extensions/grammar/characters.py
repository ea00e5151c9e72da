"""Sets of texts as automata over characters, which can be joined and subtracted."""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

# Characters as ranges of code points, first and last, in ascending order.
Ranges: TypeAlias = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
EVERY: Ranges = ((0, 0xD7FF), (0xE000, LAST))  # surrogates are no characters
MOST_REPEATS = 10_000
_MOST_NODES = 20_000
_MOST_STATES = 4096
_MOST_ROUNDS = 64


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclasses.dataclass(frozen=True)
class Sequence_:
    """Parts one after the other."""

    parts: tuple["Expression", ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several parts; of none, nothing matches."""

    parts: tuple["Expression", ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A part several times; `most` None: without limit."""

    part: "Expression"
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True)
class Edge:
    """The start or the end of the text."""

    is_start: bool


Expression: TypeAlias = Characters | Sequence_ | Choice | Repeat | Edge


class TooLarge(ValueError):
    """A grammar needs too many states; what made it says which part."""


def literal(text: str) -> Expression:
    """The expression of a text."""
    return Sequence_(tuple(Characters(((ord(each), ord(each)),)) for each in text))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in any order, which may overlap, without surrogates."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        for start, end in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if start > end:
                continue
            if found and start <= found[-1][1] + 1:
                found[-1] = found[-1][0], max(end, found[-1][1])
            else:
                found.append((start, end))
    return tuple(found)


def inverted(ranges: Ranges) -> Ranges:
    """All other characters."""
    ends = [-1, *(high for _, high in ranges)], [*(low for low, _ in ranges), LAST + 1]
    return ranges_of((low + 1, high - 1) for low, high in zip(*ends, strict=True) if low + 1 < high)


@dataclasses.dataclass(frozen=True)
class TextAutomaton:
    """A deterministic automaton over characters: the set of texts that it accepts.

    Characters that no state tells apart are one class. State 0 is the start, and every state leads
    to an end, but the start of an empty set.

    Attributes:
        starts: the code points where another class begins; the first is 0.
        classes: the class of the characters from each of these on.
        next_state: the state after a character of each class, -1: no text continues so.
        accepts: whether a text may end, of each state.
    """

    starts: tuple[int, ...]
    classes: tuple[int, ...]
    next_state: tuple[tuple[int, ...], ...]
    accepts: tuple[bool, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it accepts no text."""
        return not any(self.accepts)

    def matches(self, text: str) -> bool:
        """Whether it accepts a text."""
        state = 0
        for each in text:
            state = self.next_state[state][self.class_of(ord(each))]
            if state < 0:
                return False
        return self.accepts[state]

    def class_of(self, character: int) -> int:
        """The class of a character."""
        return self.classes[bisect.bisect_right(self.starts, character) - 1]

    def ranges(self) -> list[Ranges]:
        """The characters of each class."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(self.classes))]
        ends = [*(start - 1 for start in self.starts[1:]), LAST]
        for start, end, which in zip(self.starts, ends, self.classes, strict=True):
            found[which].append((start, end))
        return [ranges_of(pairs) for pairs in found]

    def __and__(self, other: "TextAutomaton") -> "TextAutomaton":
        """The texts that both accept."""
        return _product(self, other, lambda a, b: a and b)

    def __sub__(self, other: "TextAutomaton") -> "TextAutomaton":
        """The texts that this one accepts, and the other one does not."""
        return _product(self, other, lambda a, b: a and not b)


@functools.lru_cache(maxsize=256)
def automaton_of(expression: Expression, *, whole: bool = True) -> TextAutomaton:
    """The texts that an expression matches.

    Args:
        expression: the expression.
        whole: whether it is the whole text, or somewhere in it.

    Raises:
        ValueError: it needs too many states.
    """
    if not whole:
        anything = Repeat(Characters(EVERY), 0, None)
        expression = Sequence_((anything, expression, anything))
    if (size := _size(expression)) > _MOST_NODES:
        raise TooLarge(
            f"it has {size} parts, counted with repeats; at most {_MOST_NODES} are possible"
        )
    graph = _Graph()
    end = graph.add(expression, graph.node())
    return graph.automaton(end)


def _size(expression: Expression) -> int:
    match expression:
        case Sequence_(parts) | Choice(parts):
            return 1 + sum(map(_size, parts))
        case Repeat(part, least, most):
            return 1 + _size(part) * max(least + 1 if most is None else most, 1)
    return 1


class _Graph:
    """A nondeterministic automaton: Thompson's construction (1968)."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[Ranges, int]]] = []
        self.skips: list[list[tuple[Edge | None, int]]] = []

    def node(self) -> int:
        self.moves.append([])
        self.skips.append([])
        return len(self.moves) - 1

    def add(self, expression: Expression, start: int) -> int:
        """Adds an expression after a node, and returns the node where it ends."""
        match expression:
            case Characters(ranges):
                end = self.node()
                self.moves[start].append((ranges, end))
                return end
            case Sequence_(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Choice(parts):
                end = self.node()
                for part in parts:
                    self.skips[self.add(part, start)].append((None, end))
                return end
            case Repeat(part, least, most):
                for _ in range(least):
                    start = self.add(part, start)
                end = self.node()
                self.skips[start].append((None, end))
                if most is None:  # a part that ends where it began must not leave the loop
                    loop = self.node()
                    self.skips[start].append((None, loop))
                    self.skips[self.add(part, loop)].extend([(None, loop), (None, end)])
                    return end
                for _ in range(most - least):
                    start = self.add(part, start)
                    self.skips[start].append((None, end))
                return end
            case Edge():
                end = self.node()
                self.skips[start].append((expression, end))
                return end

    def automaton(self, end: int) -> TextAutomaton:
        """The deterministic automaton of the texts from node 0 to a node."""
        different = sorted({ranges for moves in self.moves for ranges, _ in moves})
        bounds = {0} | {at for ranges in different for r in ranges for at in (r[0], r[1] + 1)}
        starts = sorted(at for at in bounds if at <= LAST)
        inside: list[list[int]] = [[] for _ in starts]  # the sets that have a character
        for number, ranges in enumerate(different):
            for low, high in ranges:
                for i in range(bisect.bisect_left(starts, low), bisect.bisect_right(starts, high)):
                    inside[i].append(number)
        kinds: dict[tuple[int, ...], int] = {}
        classes = [kinds.setdefault(tuple(each), len(kinds)) for each in inside]
        of_set: dict[Ranges, list[int]] = {ranges: [] for ranges in different}
        for numbers, kind in kinds.items():
            for number in numbers:
                of_set[different[number]].append(kind)

        def closure(nodes: Iterable[int], edges: set[Edge | None]) -> frozenset[int]:
            found, waiting = {*nodes}, [*nodes]
            while waiting:
                for edge, after in self.skips[waiting.pop()]:
                    if edge in edges and after not in found:
                        found.add(after)
                        waiting.append(after)
            return frozenset(found)

        start, stop = Edge(is_start=True), Edge(is_start=False)
        first = closure([0], {None, start})
        known = {first: 0}
        order = [first]
        rows: list[list[int]] = []
        accepts: list[bool] = []
        for state in order:
            edges = {None, start, stop} if not rows else {None, stop}
            accepts.append(end in closure(state, edges))
            after: list[set[int]] = [set() for _ in kinds]
            for node in state:
                for ranges, target in self.moves[node]:
                    for kind in of_set[ranges]:
                        after[kind].add(target)
            row = []
            for targets in after:
                following = closure(targets, {None}) if targets else None
                if following is not None and following not in known:
                    known[following] = len(order)
                    order.append(following)
                    if len(order) > _MOST_STATES:
                        raise TooLarge(f"it needs more than {_MOST_STATES} states")
                row.append(-1 if following is None else known[following])
            rows.append(row)
        return trimmed(starts, classes, rows, accepts)


def _product(
    a: TextAutomaton, b: TextAutomaton, accepted: Callable[[bool, bool], bool]
) -> TextAutomaton:
    """Runs two automata in parallel; the first must not fail."""
    needs_both = not accepted(True, False)
    starts = sorted({*a.starts, *b.starts})
    kinds: dict[tuple[int, int], int] = {}
    classes = [kinds.setdefault((a.class_of(at), b.class_of(at)), len(kinds)) for at in starts]
    numbers, order = {(0, 0): 0}, [(0, 0)]
    rows, accepts = [], []
    for first, second in order:
        accepts.append(accepted(a.accepts[first], second >= 0 and b.accepts[second]))
        row = []
        for of_a, of_b in kinds:
            after = a.next_state[first][of_a], b.next_state[second][of_b] if second >= 0 else -1
            if after[0] < 0 or (needs_both and after[1] < 0):
                row.append(-1)
                continue
            if after not in numbers:
                numbers[after] = len(order)
                order.append(after)
                if len(order) > _MOST_STATES:
                    raise TooLarge(f"it needs more than {_MOST_STATES} states")
            row.append(numbers[after])
        rows.append(row)
    return trimmed(starts, classes, rows, accepts)


def trimmed(
    starts: Sequence[int], classes: Sequence[int], rows: list[list[int]], accepts: list[bool]
) -> TextAutomaton:
    """An automaton without states that lead to no end, and without equal states and classes."""
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for after in {*row} - {-1}:
            before[after].append(state)
    useful = {state for state, ends in enumerate(accepts) if ends}
    waiting = [*useful]
    while waiting:
        new = [state for state in before[waiting.pop()] if state not in useful]
        useful.update(new)
        waiting += new
    kept = [state for state in range(len(rows)) if state in useful or state == 0]
    rows = [[after if after in useful else -1 for after in rows[state]] for state in kept]
    group = _equal_states(kept, rows, [accepts[state] for state in kept])
    members = {group[state]: i for i, state in reversed([*enumerate(kept)])}
    number = {which: i for i, which in enumerate(sorted(members, key=members.__getitem__))}
    table = [
        [-1 if after < 0 else number[group[after]] for after in rows[members[which]]]
        for which in number
    ]
    columns: dict[tuple[int, ...], int] = {}
    merged = [columns.setdefault(column, len(columns)) for column in zip(*table, strict=True)]
    ids = [merged[kind] for kind in classes]
    firsts = [i for i, kind in enumerate(ids) if i == 0 or kind != ids[i - 1]]
    return TextAutomaton(
        tuple(starts[i] for i in firsts),
        tuple(ids[i] for i in firsts),
        tuple(zip(*columns, strict=True)),
        tuple(accepts[kept[members[which]]] for which in number),
    )


def _equal_states(
    states: Sequence[int], rows: Sequence[Sequence[int]], accepts: Sequence[bool]
) -> dict[int, int]:
    """A number for each state, the same for states that accept the same texts (Moore, 1956).

    Long chains would take too many rounds, and are left as they are.
    """
    group = {-1: -1} | {state: int(ends) for state, ends in zip(states, accepts, strict=True)}
    for _ in range(_MOST_ROUNDS):
        numbers: dict[tuple[int, ...], int] = {}
        new = {-1: -1}
        for state, row in zip(states, rows, strict=True):
            mark = (group[state], *map(group.__getitem__, row))
            new[state] = numbers.setdefault(mark, len(numbers))
        if len(numbers) == len({*group.values()}) - 1:
            return new
        group = new
    return {state: i for i, state in enumerate(states)}


ANYTHING = automaton_of(Repeat(Characters(EVERY), 0, None))
NOTHING = automaton_of(Choice(()))
