"""From a JSON schema (draft 2020-12) to the shapes of its values.

A schema is a conjunction of keywords, each of which is written as alternatives of shapes. What
cannot be written so is refused, so a grammar may allow fewer texts than a schema, and never others.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stree_jax.extensions.grammar import numbers
from stree_jax.extensions.grammar.expressions import Choice, any_text, literal
from stree_jax.extensions.grammar.formats import FORMATS
from stree_jax.extensions.grammar.graph import TooLarge, have_a_text
from stree_jax.extensions.grammar.located import Located
from stree_jax.extensions.grammar.shapes import (
    EVERYTHING,
    NOTHING,
    Arrays,
    Objects,
    Rule,
    Shape,
    Together,
    both,
    schemas_of,
)
from stree_jax.messages import shown

_MOST_REFERENCES = 3  # to a schema within itself
_MOST_SHAPES = 256
_TYPES = {
    "null": Shape(null=True),
    "boolean": Shape(booleans=EVERYTHING.booleans),
    "number": Shape(number=()),
    "integer": Shape(number=(numbers.INTEGERS,)),
    "string": Shape(string=()),
    "array": Shape(array=Arrays()),
    "object": Shape(object=Objects()),
}
# Keywords that are not read, and a value of each that says nothing.
_REFUSED: dict[str, Any] = {
    **dict.fromkeys(("not", "if", "contains", "propertyNames", "multipleOf", "maxProperties")),
    **{name: {} for name in ("patternProperties", "dependentRequired", "dependentSchemas")},
    "uniqueItems": False,
    "minProperties": 0,
    # Those of other drafts, and of other dialects, that refuse values there.
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "additionalItems", "dependencies")),
    **dict.fromkeys(("disallow", "divisibleBy", "extends")),
}


def shapes_of(together: Together) -> list[Shape]:
    """Returns the shapes of values for which all schemas hold."""
    return _all_of(map(_shapes, together), together[-1]) if together else [EVERYTHING]


def _shapes(at: Located) -> list[Shape]:
    schema = at.schema
    if isinstance(schema, bool):
        return [EVERYTHING] if schema else []
    if not isinstance(schema, Mapping):
        raise ValueError(f"{at.where} must be a dictionary, got {shown(schema)}")
    at.check_address()
    if next(at.reads, None) is None:
        raise TooLarge("it needs too many steps through references")
    for name, nothing in _REFUSED.items():
        if name in schema and schema[name] != nothing:
            at.refuse(name)
    return _all_of((fact for keywords in _KEYWORDS for fact in keywords(at)), at)


def _united(parts: Iterable[list[Shape]], at: Located) -> list[Shape]:
    """Returns all shapes of some lists that have a value."""
    united = [shape for shapes in parts for shape in shapes if shape != NOTHING]
    if len(united) > _MOST_SHAPES:
        raise ValueError(f"{at.where} has more than {_MOST_SHAPES} alternatives")
    return united


def _all_of(parts: Iterable[list[Shape]], at: Located) -> list[Shape]:
    """Returns the values that are in each of some lists."""
    shapes = [EVERYTHING]
    for part in parts:
        shapes = _united(([both(a, b)] for a in shapes for b in part), at)
    return shapes


def _logic(at: Located) -> Iterator[list[Shape]]:
    """Yields references and combinations."""
    if "$ref" in at.schema:
        inner = at.referred()
        # Beyond some there may be more, which is not followed.
        is_deep = inner.inside.count(inner.inside[-1]) > _MOST_REFERENCES
        yield [] if is_deep else _shapes(inner)
    if "allOf" in at.schema:
        yield _all_of(map(_shapes, at.parts("allOf")), at)
    if "anyOf" in at.schema:
        yield _united(map(_shapes, at.parts("anyOf")), at)
    if "oneOf" in at.schema:
        parts = [*map(_shapes, at.parts("oneOf"))]
        for some, others in itertools.combinations(parts, 2):
            if any(_may_exist(both(a, b)) for a in some for b in others):
                at.refuse("oneOf", "whose parts may hold together; write 'anyOf', or")
        yield _united(parts, at)


def _may_exist(shape: Shape, depth: int = 4) -> bool:
    """True if a shape may have a value, as far as easily seen."""
    texts = (parts for parts in (shape.number, shape.string) if parts is not None)
    has_one = shape.null or shape.booleans or shape.array is not None
    if depth == 0 or has_one or any(map(have_a_text, texts)):
        return True
    return shape.object is not None and all(
        any(
            _may_exist(inner, depth - 1)
            for inner in shapes_of(schemas_of(shape.object.rules, name))
        )
        for name in shape.object.required
    )


def _of_types(at: Located) -> Iterator[list[Shape]]:
    if "type" not in at.schema:
        return
    types = at.schema["type"]
    names = types if isinstance(types, list) else [types]
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            raise ValueError(f"{at.where} has the unknown type {shown(name)}")
    yield [_TYPES[name] for name in names]


def _of_values(at: Located) -> Iterator[list[Shape]]:
    """Yields given values."""
    for name in ("enum", "const"):
        if name not in at.schema:
            continue
        values = at.value(name, [], "a list") if name == "enum" else [at.schema[name]]
        plain = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if any(isinstance(number, float) and not math.isfinite(number) for number in plain):
            raise ValueError(f"{name!r} of {at.where} has a number that is none in JSON")
        texts = [value for value in values if isinstance(value, str)]
        for text in texts:
            at.check_text(text)
        flat = Shape(
            None in values,
            frozenset(value for value in values if isinstance(value, bool)),
            (numbers.equal_to(plain),) if plain else None,
            (Choice(tuple(map(literal, texts))),) if texts else None,
        )
        nested = (at.part(_as_schema(v)) for v in values if isinstance(v, list | Mapping))
        yield _united([[flat], *map(_shapes, nested)], at)


def _as_schema(value: Any) -> dict[str, Any]:
    """Returns the schema of one array or object."""
    if isinstance(value, list):
        sizes = {"minItems": len(value), "maxItems": len(value)}
        return {"type": "array", "prefixItems": [{"const": item} for item in value]} | sizes
    return {
        "type": "object",
        "properties": {name: {"const": item} for name, item in value.items()},
        "required": [*value],
        "additionalProperties": False,
    }


def _of_numbers(at: Located) -> Iterator[list[Shape]]:
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound, most = at.schema.get(name, 0), numbers.MOST_BOUND
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise ValueError(f"{name} of {at.where} must be a number, got {shown(bound)}")
        if not abs(bound) <= most or bound != int(bound):
            at.refuse(name, f"which is {shown(bound)}; integers up to {most} are read")
        if name in at.schema:
            side = numbers.at_least if "inimum" in name else numbers.at_most
            part = side(int(bound), or_equal=not name.startswith("exclusive"))
            yield [EVERYTHING._replace(number=(part,))]


def _of_strings(at: Located) -> Iterator[list[Shape]]:
    least, most = at.counts("Length")
    if least or most is not None:
        yield [EVERYTHING._replace(string=(any_text(least, most),))]
    if "pattern" in at.schema:
        yield [EVERYTHING._replace(string=(at.pattern(),))]
    if "format" in at.schema:
        name = at.schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise ValueError(f"{at.where} has the format {shown(name)}; known: {sorted(FORMATS)}")
        yield [EVERYTHING._replace(string=(FORMATS[name],))]


def _of_arrays(at: Located) -> Iterator[list[Shape]]:
    if isinstance(at.schema.get("items"), list):
        raise ValueError(f"'items' of {at.where} is a list; draft 2020-12 has 'prefixItems' for it")
    first = at.parts("prefixItems")
    others = at.schema_of_others("items", "unevaluatedItems", "[]")
    rules = (Rule(dict(enumerate(first)), others),) if first or others is not None else ()
    yield [EVERYTHING._replace(array=Arrays(rules, *at.counts("Items")))]


def _of_objects(at: Located) -> Iterator[list[Shape]]:
    properties = at.value("properties", {}, "a dictionary")
    required = at.value("required", [], "a list of names")
    for name in (*properties, *required):
        at.check_text(name)
    named = {name: at.part(schema, f".{name}") for name, schema in properties.items()}
    others = at.schema_of_others("additionalProperties", "unevaluatedProperties", ".*")
    rules = (Rule(named, others),) if named or others is not None else ()
    yield [EVERYTHING._replace(object=Objects(rules, tuple(required)))]


# Of these each yields the values for which a keyword holds.
_KEYWORDS = (_logic, _of_types, _of_values, _of_numbers, _of_strings, _of_arrays, _of_objects)
