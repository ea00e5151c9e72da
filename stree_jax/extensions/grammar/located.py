"""Parts of a schema, what messages call them, and references."""

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from stree_jax.extensions.grammar.expressions import MOST_REPEATS, Expression, parse
from stree_jax.messages import shown

_MOST_READS = 50_000
_WAY_OUT = "leave it out, and check the text afterwards"


class Located(NamedTuple):
    """A part of a schema, and the references on the way to it."""

    schema: Any
    where: str  # what messages call it
    root: Any  # the whole schema
    inside: tuple[int, ...]  # references on the way to it
    reads: Iterator[int]  # what is left of the parts that may be read

    def part(self, schema: Any, where: str = "") -> "Located":
        """Returns a part of this part."""
        return self._replace(schema=schema, where=f"{self.where}{where}")

    def parts(self, name: str) -> "list[Located]":
        """Returns the schemas in the list of a keyword."""
        schemas = self.value(name, [], "a list of schemas")
        return [self.part(schema, f"[{i}]") for i, schema in enumerate(schemas)]

    def referred(self) -> "Located":
        """Returns what the reference refers to, such as #/$defs/name."""
        name = self.value("$ref", "", "a text")
        schema = self.root
        try:
            start, *steps = urllib.parse.unquote(name).split("/")
            if start != "#":
                raise LookupError(name)
            for step in steps:
                if isinstance(schema, list):
                    schema = {str(i): part for i, part in enumerate(schema)}
                schema = schema[step.replace("~1", "/").replace("~0", "~")]
                self.part(schema).check_address()
        except (LookupError, TypeError):
            raise ValueError(
                f"{self.where} refers to {shown(name)}, which is not there; paths in the schema are"
                " read, such as #/$defs/name"
            ) from None
        return self._replace(schema=schema, inside=(*self.inside, id(schema)))

    def check_address(self) -> None:
        """Refuses a part with an address, which its references are relative to."""
        is_part = isinstance(self.schema, Mapping) and self.schema is not self.root
        if is_part and isinstance(self.schema.get("$id"), str):
            self.refuse("$id")

    def refuse(self, name: str, why: str = "which a grammar cannot enforce here") -> NoReturn:
        """Refuses the schema for a keyword that is not read."""
        raise ValueError(f"{self.where} has {name!r}, {why}; {_WAY_OUT}")

    def value(self, name: str, nothing: Any, what: str) -> Any:
        """Returns what a keyword has, of the type of `nothing`, its default."""
        value = self.schema.get(name, nothing)
        if not isinstance(value, Mapping if nothing == {} else type(nothing)):
            raise ValueError(f"{name!r} of {self.where} must be {what}, got {shown(value)}")
        return value

    def counts(self, what: str) -> tuple[int, int | None]:
        """Returns a least and a most number; None: without limit."""
        bounds: list[int | None] = []
        for name in (f"min{what}", f"max{what}"):
            value = self.schema.get(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if name in self.schema and (type(value) is not int or not 0 <= value <= MOST_REPEATS):
                raise ValueError(
                    f"{name} of {self.where} must be an integer from 0 to {MOST_REPEATS}, got"
                    f" {shown(value)}; {_WAY_OUT}"
                )
            bounds.append(value)
        least, most = bounds[0] or 0, bounds[1]
        if most is not None and least > most:
            raise ValueError(f"{self.where} has min{what} {least} and max{what} {most}")
        return least, most

    def pattern(self) -> Expression:
        """Returns the texts in which the pattern is found."""
        pattern = self.value("pattern", "", "a text")
        try:
            return parse(pattern, is_whole=False)
        except ValueError as error:
            raise ValueError(f"{self.where} has the {error}") from None

    def schema_of_others(self, name: str, unevaluated: str, where: str) -> "Located | None":
        """Returns the schema of what no other keyword is about."""
        schema = self.schema
        if name not in schema and schema.get(unevaluated, True) is not True:
            if {"$ref", "allOf", "anyOf", "oneOf"} & schema.keys():  # they may be about others
                self.refuse(unevaluated)
            name = unevaluated
        return self.part(schema[name], where) if name in schema else None

    def check_text(self, text: Any) -> None:
        """Refuses what is no text, or has characters that are not written."""
        if not isinstance(text, str) or any(
            "\ud800" <= letter <= "\udfff" or (letter < " " and letter not in "\b\f\n\r\t")
            for letter in text
        ):
            raise ValueError(
                f"{self.where} has {shown(text)}, which is no text, or has half of a surrogate pair"
                f" or a control character; {_WAY_OUT}"
            )


def read_schema(schema: Any) -> Located:
    """Reads a schema: a dictionary, a text, or a class with `model_json_schema`."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"schema must be a dictionary or a JSON text, got {shown(schema)}")
    return Located(schema, "the schema", schema, (), iter(range(_MOST_READS)))
