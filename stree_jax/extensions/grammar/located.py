"""A schema: its parts with what messages call them, and what references refer to."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from stree_jax.extensions.grammar.expressions import (
    ANY_TEXT,
    ECMA,
    MOST_REPEATS,
    Edge,
    Expression,
    Sequence_,
    has_anchors,
    parse,
)
from stree_jax.extensions.grammar.graph import TextSet, TooLarge, set_of
from stree_jax.messages import needs, shown

_IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "contains"}


class Located(NamedTuple):
    """A part of a schema, or its negation.

    Attributes:
        schema: the part.
        where: what messages call it.
        holds: whether it must hold, or must fail.
        inside: references on the way to it.
        resolver: what its references refer to.
    """

    schema: Any
    where: str
    holds: bool
    inside: tuple[int, ...]
    resolver: Any

    def __eq__(self, other: object) -> bool:
        """Of the same part; parts are no values, and may be large."""
        return isinstance(other, Located) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells parts apart."""
        return id(self.schema), self.holds, self.inside, self.where

    @property
    def negated(self) -> "Located":
        """The negation."""
        return self._replace(holds=not self.holds)

    @property
    def positive(self) -> "Located":
        """The same part, which must hold."""
        return self._replace(holds=True)

    def part(self, schema: Any, where: str) -> "Located":
        """A part of this part, which must hold or fail as this one."""
        return self._replace(schema=schema, where=f"{self.where}{where}")

    def at_its_address(self) -> "Located":
        """This part, which may have its own address; its references are seen from there."""
        if self.resolver is None or not isinstance(self.schema.get("$id"), str):
            return self
        from referencing.jsonschema import DRAFT202012

        resource = DRAFT202012.create_resource(self.schema)
        return self._replace(resolver=self.resolver.in_subresource(resource))

    def referred(self) -> "Located":
        """What the reference refers to."""
        name = self.schema["$ref"]
        try:
            found = self.resolver.lookup(name)
        except Exception as error:  # the package raises many types
            raise ValueError(
                f"{self.where} refers to {shown(name)}, which is not there ({type(error).__name__})"
            ) from None
        inside = (*self.inside, id(found.contents))
        return self._replace(schema=found.contents, inside=inside, resolver=found.resolver)

    def refuse(self, name: str) -> NoReturn:
        """Refuses the schema for a keyword that cannot be enforced."""
        raise ValueError(
            f"{self.where} has {name!r}, which a grammar cannot enforce here; leave it out, and"
            " check the text afterwards"
        )

    def parts(self, name: str) -> "list[Located]":
        """The schemas in the list of a keyword."""
        value = self.schema[name]
        if not isinstance(value, list) or not value:
            raise ValueError(
                f"{name!r} of {self.where} must be a list of schemas, got {shown(value)}"
            )
        return [self.part(each, f"[{i}]") for i, each in enumerate(value)]

    def counts(self, least: str, most: str) -> tuple[int, int | None]:
        """Two keywords that are a least and a most number; None: without limit."""
        found: list[int | None] = []
        for name in (least, most):
            value = self.schema.get(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if name in self.schema and (type(value) is not int or value < 0):
                raise ValueError(
                    f"{name} of {self.where} must be an integer, at least 0; got {shown(value)}"
                )
            if value is not None and value > MOST_REPEATS:
                raise ValueError(
                    f"{name} of {self.where} is {shown(value)}; at most {MOST_REPEATS} are"
                    " possible: leave it out, and check the text afterwards"
                )
            found.append(value)
        low, high = found
        if low is not None and high is not None and low > high:
            raise ValueError(f"{self.where} has {least} {low} and {most} {high}")
        return low or 0, high

    def names(self, keyword: str) -> list[str]:
        """The names in the list of a keyword, none without it."""
        value = self.schema.get(keyword, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(
                f"{keyword!r} of {self.where} must be a list of names, got {shown(value)}"
            )
        for name in value:
            self.check_text(name)
        return value

    def table(self, keyword: str) -> Mapping[str, Any]:
        """What a keyword has by names, empty without it."""
        value = self.schema.get(keyword, {})
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{keyword!r} of {self.where} must be a dictionary")
        for name in value:
            self.check_text(name)
        return value

    def pattern(self, pattern: Any) -> TextSet | Expression:
        """The texts in which a pattern is found."""
        if not isinstance(pattern, str):
            raise ValueError(f"{self.where} has the pattern {shown(pattern)}, which is no text")
        try:
            expression = parse(pattern, ECMA)
            match expression:
                case Sequence_((Edge(True), *inner, Edge(False))) if not any(
                    map(has_anchors, inner)
                ):
                    return Sequence_(tuple(inner))
            return set_of(Sequence_((ANY_TEXT, expression, ANY_TEXT)))
        except TooLarge as error:
            raise ValueError(f"{self.where} has the pattern {shown(pattern)}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{self.where} has the {error}") from None

    def rest(self, name: str, name_of_rest: str) -> Any:
        """The schema of what no other keyword is about; None: there is none."""
        schema = self.schema
        if name in schema or schema.get(name_of_rest, True) is True:
            return schema.get(name)
        if _IN_PLACE & schema.keys():  # they may be about other items or properties
            self.refuse(name_of_rest)
        return schema[name_of_rest]

    def check_text(self, text: str) -> None:
        """Refuses half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{self.where} has {shown(text)}, which is no text of characters"
            ) from None


def read_schema(schema: Any) -> Located:
    """A schema from a dictionary, a JSON text, or a class with `model_json_schema`.

    Raises:
        ValueError: it is malformed.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"schema must be a dictionary or a JSON text, got {shown(schema)}")
    return Located(schema, "the schema", True, (), _resolver(schema))


def _refers(schema: Any) -> bool:
    """Whether there is a reference in a schema."""
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _resolver(schema: Any) -> Any:
    """What finds what the references of a schema refer to, by the package referencing."""
    if not _refers(schema):
        return None
    try:
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012
    except ImportError:
        raise ValueError(needs("'$ref'", "referencing", "grammar")) from None
    resource = DRAFT202012.create_resource(schema)
    base = resource.id() or "urn:schema"
    return Registry().with_resource(base, resource).resolver(base)
