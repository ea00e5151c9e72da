"""Deterministic automata over the bytes of texts, made of graphs."""

from collections.abc import Sequence

import numpy as np

from stree_jax.extensions.grammar.byte_graph import (
    BODY,
    MOST_STATES,
    Body,
    ByteGraph,
    byte_classes,
)
from stree_jax.extensions.grammar.characters import TooLarge

_MOST_POSITIONS = 1 << 21  # of bodies


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
        self.class_of, self.members = byte_classes(graph.moves, [b.template for b in graph.bodies])
        self.numbers: dict[frozenset[int], int] = {}
        self.order: list[frozenset[int]] = []
        self.plain: dict[int, bool] = {}  # bodies whose states are not listed
        self._moves: dict[int, dict[int, list[int]]] = {}
        self._closures: dict[frozenset[int], frozenset[int]] = {}

    def moves(self, node: int) -> dict[int, list[int]]:
        """The nodes after a node, by the class of the byte."""
        if node < BODY:
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
        base = (which + 1) * BODY + after * size
        return {kind: [base + int(target)] for kind, target in enumerate(row) if target >= 0}

    def place(self, node: int) -> tuple[int, int, int, Body]:
        """The body of a node, its number, the count and the position there."""
        which = node // BODY - 1
        body = self.graph.bodies[which]
        count, position = divmod(node % BODY, len(body.template.after))
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
        return node >= BODY or node == self.end or bool(self.graph.moves[node])

    def skips(self, node: int) -> list[int]:
        """The nodes that a node is joined to."""
        if node < BODY:
            return self.graph.skips[node]
        _, count, position, body = self.place(node)
        return [body.end] if body.may_end(count, position) else []

    def state(self, nodes: frozenset[int]) -> int:
        """The number of a set of nodes, or the node of a body that it is."""
        for node in nodes:
            if node >= BODY and self.closure(frozenset([node])) == nodes and self.is_plain(node):
                return node
        return self.listed(nodes)

    def listed(self, nodes: frozenset[int]) -> int:
        """The number of a set of nodes."""
        if nodes not in self.numbers:
            if len(self.order) == MOST_STATES:
                raise TooLarge(f"it needs more than {MOST_STATES} states")
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
            if target >= BODY:
                target = bodies[number_of[target // BODY - 1]].first + target % BODY
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
