"""The texts of JSON values, as a graph of bytes.

Properties come in the order in which schemas name them, then others. There is at most one space
between parts, and a character is written in one way. Values of which nothing is known have three
levels of arrays and objects.
"""

import json
from typing import Any

from stree_jax.extensions.grammar import numbers
from stree_jax.extensions.grammar.byte_automaton import ByteAutomaton, automaton_of_graph
from stree_jax.extensions.grammar.expressions import any_text
from stree_jax.extensions.grammar.graph import Graph, TooLarge
from stree_jax.extensions.grammar.located import read_schema
from stree_jax.extensions.grammar.schema import shapes_of
from stree_jax.extensions.grammar.shapes import Arrays, Objects, Shape, Together, schemas_of

_FREE_LEVELS = 3


def automaton_of_schema(schema: Any) -> tuple[ByteAutomaton, str]:
    """Returns the automaton of a schema's texts, and its largest part."""
    writer = _Writer()
    try:
        end = writer.value(0, (read_schema(schema),), _FREE_LEVELS)
        automaton = automaton_of_graph(writer.graph, end)
    except TooLarge as error:
        raise ValueError(too_large(writer.largest(), error)) from None
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    if automaton is None:
        raise ValueError(
            "the schema contradicts itself, or refers to itself without an end, so no text is valid"
        )
    return automaton, writer.largest()


def too_large(part: str, error: TooLarge) -> str:
    """Returns what is said of a schema that needs too many states."""
    return (
        f"{part} cannot be used: {error}, most of them for this part; lower its maxItems, maxLength"
        " or depth, or leave it out and check the text afterwards"
    )


class _Writer:
    """Adds values to a graph; methods return the node after them."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.sizes: dict[str, int] = {}  # nodes of each part, with its own parts, at most

    def largest(self) -> str:
        """Returns the smallest part that has most of the nodes."""
        most = max(self.sizes.values(), default=0)
        parts = {where: size for where, size in self.sizes.items() if 2 * size > most}
        return min(parts, key=parts.__getitem__, default="the schema")

    def value(self, start: int, together: Together, levels: int) -> int:
        """Adds the values for which schemas hold, with free `levels` inside."""
        before = len(self.graph.moves)
        try:
            shapes = shapes_of(together)
            ends = [end for shape in shapes for end in self.shape(start, shape, levels)]
            return self.graph.node(*ends)
        finally:
            if together:
                where = together[-1].where
                size = len(self.graph.moves) - before
                self.sizes[where] = max(self.sizes.get(where, 0), size)

    def shape(self, start: int, shape: Shape, levels: int) -> list[int]:
        """Adds the values of each type of a shape."""
        words = ["null"] * shape.null + [json.dumps(value) for value in sorted(shape.booleans)]
        ends = [self.graph.text(start, word) for word in words]
        if shape.number is not None:
            ends.append(self.graph.all_of(start, shape.number or (numbers.ANY,)))
        if shape.string is not None:
            inside = self.graph.text(start, '"')
            inside = self.graph.all_of(inside, shape.string or (any_text(),), quoted=True)
            ends.append(self.graph.text(inside, '"'))
        if shape.array is not None and (levels or shape.array != Arrays()):
            ends.append(self.array(start, shape.array, levels - (shape.array == Arrays())))
        if shape.object is not None and (levels or shape.object != Objects()):
            ends.append(self.object(start, shape.object, levels - (shape.object == Objects())))
        return ends

    def sign(self, start: int, text: str) -> int:
        """Adds a sign between parts, with or without spaces around it."""
        return self.space(self.graph.text(self.space(start), text))

    def space(self, start: int) -> int:
        """Adds a space or none."""
        return self.graph.node(start, self.graph.text(start, " "))

    def array(self, start: int, arrays: Arrays, levels: int) -> int:
        """Adds arrays: each item apart, until all others are alike."""
        node = self.space(self.graph.text(start, "["))
        number = 0
        closes: list[int] = []
        last = max([arrays.least - 1, 0, *(len(rule.by_key) for rule in arrays.rules)])
        while True:
            if number >= arrays.least:
                closes.append(node)
            if number == arrays.most:
                break
            before = self.graph.node(self.sign(node, ",") if number else node)
            node = self.value(before, schemas_of(arrays.rules, number), levels)
            if arrays.most is None and number == last:
                self.graph.skips[self.sign(node, ",")].append(before)
                closes.append(node)
                break
            number += 1
        return self.graph.text(self.space(self.graph.node(*closes)), "]")

    def object(self, start: int, objects: Objects, levels: int) -> int:
        """Adds objects: named properties, which may be left out, then others."""
        # Nodes after which no comma comes, and those after which one does.
        opened: list[int] = [self.space(self.graph.text(start, "{"))]
        written: list[int] = []
        named = [item for rule in objects.rules for item in rule.by_key.items()]
        names = [*dict.fromkeys([*(str(name) for name, _ in named), *objects.required])]
        for name in names:
            before = self.graph.node(*opened, *[self.sign(node, ",") for node in written])
            key = self.graph.text(before, json.dumps(name, ensure_ascii=False))
            after = self.value(self.sign(key, ":"), schemas_of(objects.rules, name), levels)
            if name in objects.required:
                opened, written = [], [after]
            else:
                written = [self.graph.node(*written, after)]
        # Where schemas say what some properties are, and not what others are, none are wanted.
        others = schemas_of(objects.rules, None)
        is_open = bool(others) or all(part.schema is False for _, part in named)
        if is_open and all(part.schema is not False for part in others):
            before = self.graph.node(*opened, *[self.sign(node, ",") for node in written])
            key = self.graph.other_than(self.graph.text(before, '"'), names)
            after = self.value(self.sign(self.graph.text(key, '"'), ":"), others, levels)
            self.graph.skips[self.sign(after, ",")].append(before)
            written.append(after)
        close = self.graph.node(*opened, *written)
        return self.graph.text(self.space(close), "}")
