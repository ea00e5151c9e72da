"""The texts of JSON values, as a graph of bytes.

Properties come in the order in which schemas name them, then others. There is at most one space
between parts, and a character is written in one way. Values of which nothing is known have three
levels of arrays and objects.
"""

import functools
import itertools
import json
from typing import Any

from stree_jax.extensions.grammar.byte_automaton import ByteAutomaton, automaton_of_graph
from stree_jax.extensions.grammar.expressions import Choice, literal
from stree_jax.extensions.grammar.graph import (
    ANYTHING,
    MOST_NODES,
    Graph,
    TextSet,
    TooLarge,
    quoted_set,
    set_of,
)
from stree_jax.extensions.grammar.located import Located, read_schema
from stree_jax.extensions.grammar.schema import (
    schemas_of_item,
    schemas_of_name,
    shapes_of,
)
from stree_jax.extensions.grammar.shapes import Arrays, Objects, Shape, Strings, Together

_FREE_LEVELS = 3
_MOST_PATTERNS = 4


def automaton_of_schema(schema: Any) -> tuple[ByteAutomaton, str]:
    """The automaton over bytes of the JSON texts that a schema validates.

    Returns:
        The automaton, and the part of the schema that takes most of its states.

    Raises:
        ValueError: a schema that is malformed or cannot be enforced, that needs too many states, or
            that no text satisfies.
    """
    writer = _Writer()
    start, end = writer.graph.node(), writer.graph.node()
    try:
        writer.value((read_schema(schema),), start, end, _FREE_LEVELS)
        found = automaton_of_graph(writer.graph, start, end)
    except TooLarge as error:
        raise ValueError(too_large(writer.largest(), error)) from None
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    if found is None:
        raise ValueError(
            "the schema contradicts itself, or refers to itself without an end, so no text is valid"
        )
    return found, writer.largest()


def too_large(part: str, error: TooLarge) -> str:
    """What is said of a schema that needs too many states."""
    return (
        f"{part} cannot be used: {error}, most of them for this part; lower its maxItems, maxLength"
        " or depth, or leave it out and check the text afterwards"
    )


class _Writer:
    """Adds values to a graph, between two nodes."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.sizes: dict[str, int] = {}  # nodes of each part, with its own parts
        self.open: list[tuple[str, int]] = []

    def largest(self) -> str:
        """The smallest part that has most of the nodes."""
        for where, start in reversed(self.open):
            if 2 * (len(self.graph.moves) - start) > MOST_NODES:
                return where
        most = max(self.sizes.values(), default=0)
        parts = {where: size for where, size in self.sizes.items() if 2 * size > most}
        return min(parts, key=parts.__getitem__, default="the schema")

    def value(self, together: Together, start: int, end: int, levels: int) -> None:
        """The values for which schemas hold; `levels` of arrays and objects are free."""
        where, before = together[-1].where if together else "", len(self.graph.moves)
        if where:
            self.open.append((where, before))
        for shape in shapes_of(together):
            self.shape(shape, start, end, levels)
        if where:
            self.open.pop()
            self.sizes[where] = self.sizes.get(where, 0) + len(self.graph.moves) - before

    def shape(self, shape: Shape, start: int, end: int, levels: int) -> None:
        """The values of a shape."""
        graph = self.graph
        if shape.null:
            graph.skip(graph.text(start, "null"), end)
        for value in shape.booleans:
            graph.skip(graph.text(start, "true" if value else "false"), end)
        if shape.number is not None:
            graph.skip(graph.texts(start, shape.number), end)
        if shape.string is not None:
            graph.skip(self.string(start, shape.string), end)
        if shape.array is not None and (levels or shape.array != Arrays()):
            self.array(shape.array, start, end, levels - (shape.array == Arrays()))
        if shape.object is not None and (levels or shape.object != Objects()):
            self.object(shape.object, start, end, levels - (shape.object == Objects()))

    def string(self, start: int, strings: Strings) -> int:
        """A string."""
        graph, texts = self.graph, strings.texts
        start = graph.text(start, '"')
        is_plain = strings.least == 0 and strings.most is None
        if is_plain and not isinstance(texts, TextSet):
            start = graph.expression(start, texts, quoted=True)
        else:
            start = graph.body(start, quoted_set(strings.set), strings.least, strings.most)
        return graph.text(start, '"')

    def symbol(self, start: int, text: str) -> int:
        """A sign between parts, with a space before and after it or not."""
        return self.space(self.graph.text(self.space(start), text))

    def space(self, start: int) -> int:
        """A space or none."""
        end = self.graph.node()
        self.graph.skip(start, end)
        self.graph.skip(self.graph.text(start, " "), end)
        return end

    def array(self, arrays: Arrays, start: int, end: int, levels: int) -> None:
        """Arrays. A node before each item, by how many there are, and how many schemas hold for."""
        if arrays.unique and (arrays.most is None or arrays.most > 1):
            arrays.unique[0].refuse("uniqueItems")
        graph = self.graph
        different = max([0, *(len(rule.first) for rule in arrays.rules)])
        last = max(1, different, arrays.least) if arrays.most is None else arrays.most
        close = graph.node()
        graph.skip(graph.text(self.space(close), "]"), end)
        nodes = _Nodes(graph, (0, (0,) * len(arrays.contained)))
        graph.skip(self.space(graph.text(start, "[")), nodes[nodes.order[0]])

        @functools.cache
        def item(schemas: Together, target: int) -> int:
            node = graph.node()
            self.value(schemas, node, target, levels)
            return node

        for number, counts in nodes.order:  # it grows meanwhile
            node = nodes[number, counts]
            enough = all(c.least <= n for c, n in zip(arrays.contained, counts, strict=True))
            if number >= arrays.least and enough:
                graph.skip(node, close)
            if arrays.most is not None and number == arrays.most:
                continue
            before = self.symbol(node, ",") if number else node
            own = schemas_of_item(arrays, number)
            for held in itertools.product((True, False), repeat=len(arrays.contained)):
                parts = zip(arrays.contained, held, strict=True)
                more = tuple(c.schema if holds else c.schema.negated for c, holds in parts)
                after = _counted(arrays, counts, held)
                if after is None:
                    continue
                graph.skip(before, item(own + more, nodes[min(number + 1, last), after]))

    def object(self, objects: Objects, start: int, end: int, levels: int) -> None:
        """Objects. A node before each property, by how many are written."""
        graph = self.graph
        allowed = [each.string for each in shapes_of(objects.names) if each.string is not None]
        named = dict.fromkeys(name for rule in objects.rules for name, _ in rule.named)
        names = [*dict.fromkeys([*named, *objects.required])]
        others = self.other_names(objects, names, allowed)
        # Of other properties one may come twice, and counts once.
        is_counted = objects.most is not None or objects.least > len(objects.required)
        last = max(objects.least, objects.most or 0, 1) if is_counted else 1
        close = graph.node()
        graph.skip(graph.text(self.space(close), "}"), end)
        # By names passed, properties, and other properties among these.
        nodes = _Nodes(graph, (0, 0, 0))
        graph.skip(self.space(graph.text(start, "{")), nodes[0, 0, 0])

        @functools.cache
        def entry(name: str | None, target: int) -> int:
            """A property and its value; None: another one."""
            node = graph.node()
            if name is not None:
                key = graph.text(node, json.dumps(name, ensure_ascii=False))
                self.value(schemas_of_name(objects, name), self.symbol(key, ":"), target, levels)
                return node
            for keys, schemas in others:
                self.value(schemas, self.symbol(self.string(node, keys), ":"), target, levels)
            return node

        for passed, count, free in nodes.order:  # it grows meanwhile
            node = nodes[passed, count, free]
            is_full = objects.most is not None and count == objects.most
            before = self.symbol(node, ",") if count else node
            if passed < len(names):
                name = names[passed]
                if name not in objects.required:
                    graph.skip(node, nodes[passed + 1, count, free])
                if not is_full and any(each.matches(name) for each in allowed):
                    target = nodes[passed + 1, min(count + 1, last), free]
                    graph.skip(before, entry(name, target))
                continue
            if count - free + min(free, 1) >= objects.least or not is_counted:
                graph.skip(node, close)
            if others and not is_full:
                others_written = min(free + 1, last) if is_counted else 0
                target = nodes[passed, min(count + 1, last), others_written]
                graph.skip(before, entry(None, target))

    def other_names(
        self, objects: Objects, names: list[str], allowed: list[Strings]
    ) -> list[tuple[Strings, Together]]:
        """Other names and the schemas of their properties.

        Names that no schema speaks of are left out where schemas say what some properties are, and
        not what all are: then those are what is wanted.
        """
        patterns = [pattern for rule in objects.rules for pattern, _ in rule.patterns]
        patterns = [*dict.fromkeys(patterns)]
        if len(patterns) > _MOST_PATTERNS:
            raise ValueError(
                f"an object has {len(patterns)} patterns of names, at most {_MOST_PATTERNS}"
            )
        says_some = any(
            each.schema is not False for rule in objects.rules for _, each in rule.named
        )
        says_others = any(rule.others is not None for rule in objects.rules)
        free = ANYTHING - set_of(Choice(tuple(map(literal, names)))) if names else ANYTHING
        found = []
        for matched in itertools.product((False, True), repeat=len(patterns)):
            texts: TextSet = free
            for pattern, is_matched in zip(patterns, matched, strict=True):
                texts = texts & pattern if is_matched else texts - pattern
            chosen = {pattern for pattern, is_one in zip(patterns, matched, strict=True) if is_one}
            if texts.is_empty or not (chosen or says_others or not (says_some or patterns)):
                continue
            schemas: list[Located] = []
            for rule in objects.rules:
                own = [schema for pattern, schema in rule.patterns if pattern in chosen]
                schemas += own or ([] if rule.others is None else [rule.others])
            if any(
                schema.schema is not schema.holds and isinstance(schema.schema, bool)
                for schema in schemas
            ):
                continue
            for each in allowed:
                both = texts if each.texts is ANYTHING else texts & each.set
                if not both.is_empty:
                    found.append((Strings(both, each.least, each.most), tuple(schemas)))
        return found


def _counted(
    arrays: Arrays, counts: tuple[int, ...], held: tuple[bool, ...]
) -> tuple[int, ...] | None:
    """How many items schemas hold for after one more; None: too many."""
    found = []
    for each, count, holds in zip(arrays.contained, counts, held, strict=True):
        count += holds
        if each.most is not None and count > each.most:
            return None
        found.append(count if each.most is not None else min(count, each.least))
    return tuple(found)


class _Nodes(dict[Any, int]):
    """Nodes of a graph by some key, made when they are asked for, and the keys in this order."""

    def __init__(self, graph: Graph, first: Any):
        self.graph, self.order = graph, list[Any]()
        self[first]

    def __missing__(self, key: Any) -> int:
        self[key] = self.graph.node()
        self.order.append(key)
        return self[key]
