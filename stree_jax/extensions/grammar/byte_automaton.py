"""Deterministic automata over the bytes of texts, made of graphs."""

from typing import NamedTuple

import numpy as np

from stree_jax.extensions.grammar.graph import Graph, TooLarge

MOST_STATES = 20_000
_MOST_WORK = 1_000_000  # nodes in all states


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes; state 0 is the start."""

    class_of: np.ndarray  # [256], of each byte
    table: np.ndarray  # [S, classes], the state after a byte; -1: no text continues so
    accepts: np.ndarray  # [S], whether a text may end

    def matches(self, text: bytes) -> bool:
        """True if it accepts a text."""
        state = 0
        for byte in text:
            state = self.table[state, self.class_of[byte]]
            if state < 0:
                return False
        return bool(self.accepts[state])


def automaton_of_graph(graph: Graph, end: int) -> ByteAutomaton | None:
    """Makes the automaton of texts that lead to a node (Rabin and Scott, 1959); None: of none.

    States have the order of their nodes, so that copies of a part have the same distances inside.
    """
    useful = graph.leading_to(end)
    if 0 not in useful:
        return None
    # The class of each byte, and the classes of each range.
    ranges = sorted({byte for after in graph.moves for byte, _ in after})
    every = np.arange(256)
    marks = [(low <= every) & (every <= high) for low, high in ranges]
    _, class_of = np.unique(np.array([every < 0, *marks]), axis=1, return_inverse=True)
    class_of = class_of.ravel()
    kinds_of = {it: np.unique(class_of[it[0] : it[1] + 1]).tolist() for it in ranges}
    moves: dict[int, dict[int, list[int]]] = {}
    for node in useful:
        moves[node] = {}
        for byte, target in graph.moves[node]:
            for kind in kinds_of[byte] if target in useful else ():
                moves[node].setdefault(kind, []).append(target)

    def closure(nodes: tuple[int, ...]) -> frozenset[int]:
        """Returns the nodes that skips lead to, but those only passed."""
        closed = {*nodes}
        waiting = [*nodes]
        while waiting:
            new = [n for n in graph.skips[waiting.pop()] if n in useful and n not in closed]
            closed.update(new)
            waiting += new
        return frozenset(n for n in closed if moves[n] or n == end)

    states = [closure((0,))]
    first_nodes = [[-1]]
    work = 0
    numbers = {states[0]: 0}
    reached: dict[tuple[int, ...], int] = {}  # numbers of states by the targets that lead to them
    edges: list[tuple[int, int, int]] = []
    for number, nodes in enumerate(states):  # it grows meanwhile
        after: dict[int, list[int]] = {}
        for node in nodes:
            for kind, targets in moves[node].items():
                after.setdefault(kind, []).extend(targets)
        for kind, targets in after.items():
            key = tuple(targets)
            if key not in reached:
                state = closure(key)
                reached[key] = numbers.setdefault(state, len(states))
                if reached[key] == len(states):
                    states.append(state)
                    first_nodes.append(sorted(key))
            edges.append((number, kind, reached[key]))
        work += len(nodes)
        if len(states) > MOST_STATES:
            raise TooLarge(f"it needs more than {MOST_STATES} states")
        if work > _MOST_WORK:
            raise TooLarge("too many of its alternatives overlap")
    order = sorted(range(len(states)), key=first_nodes.__getitem__)
    place = np.argsort(order)
    table = np.full((len(states), class_of.max() + 1), -1)
    before, kinds, following = np.array(edges, np.int64).reshape(-1, 3).T
    table[place[before], kinds] = place[following]
    return ByteAutomaton(class_of, table, np.array([end in states[number] for number in order]))
