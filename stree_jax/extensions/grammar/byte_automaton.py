"""Deterministic automata over the bytes of texts, made of graphs."""

from collections.abc import Sequence

import numpy as np

from stree_jax.extensions.grammar.graph import BODY, Body, Determinised, Graph, TooLarge

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
        bodies: Sequence[Body],
    ):
        self.class_of, self.table = class_of, table
        self.accepts = np.concatenate(
            [accepts, *((body.may_end & accepts[body.end]).ravel() for body in bodies)]
        )
        leads = [body.leads.ravel() for body in bodies]
        self.useful = np.concatenate([np.ones(len(table), bool), *leads])
        self.bodies = bodies
        self._firsts = np.array([body.first for body in bodies], np.int64)
        self._ends = np.array([body.end for body in bodies], np.int64)
        self._least = np.array([body.least for body in bodies], np.int64)
        self._most = np.array([-1 if b.most is None else b.most for b in bodies], np.int64)
        self._sizes = np.array([len(body.texts.after) for body in bodies], np.int64)
        # The positions of all sets, one after the other.
        sets = [*dict.fromkeys(body.texts for body in bodies)]
        places, at = {}, 0
        for texts in sets:
            places[texts] = at
            at += len(texts.after)
        self._places = np.array([places[body.texts] for body in bodies], np.int64)
        some = np.array([np.flatnonzero(class_of == kind)[0] for kind in range(table.shape[1])])
        self._after = np.concatenate(
            [each.after[:, each.class_of[some]] for each in sets] or [table[:0]]
        )
        self._begins = np.concatenate([each.begins for each in sets] or [np.zeros(0, bool)])
        self._may_end = np.concatenate([each.accepts for each in sets] or [np.zeros(0, bool)])

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


def automaton_of_graph(graph: Graph, start: int, end: int) -> ByteAutomaton | None:
    """The automaton of the texts between two nodes; None: there is no such text.

    Raises:
        TooLarge: it needs too many states.
    """
    found = Determinised(graph, start, end)
    if not found.order:
        return None
    table = np.array(found.rows, np.int64)
    bodies, first = [], len(table)
    for which in (which for which, plain in found.plain.items() if plain):
        body = graph.bodies[which]
        node = (which + 1) * BODY
        in_body = (table >= node) & (table < node + BODY)
        table[in_body] += first - node
        end_state = found.listed(found.closure([body.end]))
        bodies.append(body._replace(first=first, end=end_state))
        first += body.num_states
        if first > _MOST_POSITIONS:
            raise TooLarge(f"it needs more than {_MOST_POSITIONS} states")
    return ByteAutomaton(found.class_of, table, np.array(found.accepts), bodies)
