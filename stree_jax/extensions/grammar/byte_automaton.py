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
        num_states: number of states, S.
    """

    def __init__(
        self,
        class_of: np.ndarray,
        table: np.ndarray,
        accepts: np.ndarray,
        bodies: Sequence[Body],
    ):
        self.class_of, self.table, self.bodies = class_of, table, bodies
        parts, leads = [accepts], [np.ones(len(table), bool)]
        for body in bodies:
            ends = (np.arange(body.last + 1)[:, None] >= body.least) & body.texts.accepts
            parts.append((ends & accepts[body.end]).ravel())
            leads.append(body.leads.ravel())
        self.accepts, self.useful = np.concatenate(parts), np.concatenate(leads)
        self.num_states = len(self.accepts)
        self._firsts = np.array([body.first for body in bodies], np.int64)
        bounds = [(body.first, body.end, body.least, body.last, body.beyond) for body in bodies]
        self._bounds = np.array(bounds, np.int64).reshape(-1, 5).T
        self._sets = [*dict.fromkeys(body.texts for body in bodies)]
        numbers = {texts: number for number, texts in enumerate(self._sets)}
        self._set_of = np.array([*(numbers[body.texts] for body in bodies), -1])

    def body_of(self, states: np.ndarray) -> np.ndarray:
        """The number of the body that a state is in, -1: none."""
        return np.searchsorted(self._firsts, states, side="right") - 1

    def after(self, states: np.ndarray, byte: np.ndarray) -> np.ndarray:
        """The state after a byte each, -1: no text continues so."""
        kinds = self.class_of[byte]
        if states.max(initial=0) < len(self.table):
            return self.table[states, kinds]
        number = self.body_of(states)
        set_of = self._set_of[number]
        found = np.full(len(states), -1, np.int64)
        found[set_of < 0] = self.table[states[set_of < 0], kinds[set_of < 0]]
        for which, texts in enumerate(self._sets):
            here = np.flatnonzero(set_of == which)
            first, end, least, last, beyond = self._bounds[:, number[here]]
            count, position = np.divmod(states[here] - first, len(texts.after))
            after = texts.after[position, texts.class_of[byte[here]]]
            counted = count + texts.begins[position]
            counted = np.where(counted > last, beyond, counted)
            stays = np.where(counted < 0, -1, first + counted * len(texts.after) + after)
            may_end = texts.accepts[position] & (count >= least)
            ends = np.where(may_end, self.table[end, kinds[here]], -1)
            found[here] = np.where(after >= 0, stays, ends)
        return np.where((found >= 0) & self.useful[found], found, -1)

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
    if found.is_empty:
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
        first += body.leads.size
        if first > _MOST_POSITIONS:
            raise TooLarge(f"it needs more than {_MOST_POSITIONS} states")
    return ByteAutomaton(found.class_of, table, np.array(found.accepts), bodies)
