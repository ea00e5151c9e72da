"""From a JSON schema (draft 2020-12) to the shapes of the values that it validates.

A schema is a conjunction of keywords, each of which holds or fails for a value. Both are written as
alternatives of shapes, so that `not`, `oneOf` and `if` are what they mean. Alternatives that cannot
be written are left out, so a grammar may allow fewer texts than a schema, and never others.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stree_jax.extensions.grammar import numbers
from stree_jax.extensions.grammar.expressions import Choice, literal
from stree_jax.extensions.grammar.formats import FORMATS
from stree_jax.extensions.grammar.graph import ANYTHING
from stree_jax.extensions.grammar.located import Located
from stree_jax.extensions.grammar.shapes import (
    EVERYTHING,
    Arrays,
    Contained,
    ItemRule,
    Objects,
    PropertyRule,
    Shape,
    Strings,
    Together,
    both,
)
from stree_jax.messages import shown

_MOST_REFERENCES = 3  # to a schema within itself
_MOST_SHAPES = 256
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
# The others, that older drafts have too, and that refuse values there.
_REFUSED = (
    *("$dynamicRef", "$recursiveRef", "additionalItems", "dependencies"),
    *("disallow", "divisibleBy", "extends"),
)


def shapes_of(together: Together) -> list[Shape]:
    """The shapes of the values for which schemas hold together; none: there is no value.

    Raises:
        ValueError: a schema that is malformed, or that cannot be enforced.
    """
    return _all_of(map(_shapes, together), together[-1]) if together else [EVERYTHING]


def _shapes(at: Located) -> list[Shape]:
    schema = at.schema
    if isinstance(schema, bool):
        return [EVERYTHING] if schema is at.holds else []
    if not isinstance(schema, Mapping):
        raise ValueError(f"{at.where} must be a dictionary, got {shown(schema)}")
    at = at.at_its_address()
    for name in _REFUSED:
        if name in schema:
            at.refuse(name)
    facts = (fact for keywords in _KEYWORDS for fact in keywords(at))
    return _all_of(facts, at) if at.holds else _united(facts, at)


def _product(a: list[Shape], b: list[Shape], at: Located) -> list[Shape]:
    """The values that are in one of each of two lists."""
    if a == [EVERYTHING]:
        return b
    met = (both(first, second) for first in a for second in b)
    return _united(([shape] for shape in met), at)


def _united(parts: Any, at: Located) -> list[Shape]:
    """All different shapes that have a value."""
    found: dict[Shape, None] = {}
    for shapes in parts:
        found |= dict.fromkeys(shape for shape in shapes if not shape.is_empty)
        if len(found) > _MOST_SHAPES:
            raise ValueError(f"{at.where} has more than {_MOST_SHAPES} alternatives")
    return [*found]


def _all_of(parts: Iterable[list[Shape]], at: Located) -> list[Shape]:
    """The values that are in each of some lists."""
    found = [EVERYTHING]
    for part in parts:
        found = _product(found, part, at)
    return found


def _fact(at: Located, holds: dict[str, Any], *fails: dict[str, Any]) -> list[Shape]:
    """Of the fields of a shape that differ from others, and shapes for which it fails."""
    return [EVERYTHING._replace(**holds)] if at.holds else [Shape(**each) for each in fails]


def _logic(at: Located) -> Iterator[list[Shape]]:
    """References and combinations. Parts hold or fail as the whole does."""
    schema, every, some = at.schema, _all_of, _united
    if not at.holds:
        every, some = some, every
    if "$ref" in schema:
        yield _reference(at)
    if "allOf" in schema:
        yield every(map(_shapes, at.parts("allOf")), at)
    if "anyOf" in schema:
        yield some(map(_shapes, at.parts("anyOf")), at)
    if "oneOf" in schema:
        yield _one_of(at.positive.parts("oneOf"), at)
    if "not" in schema:
        yield _shapes(at.part(schema["not"], "").negated)
    if "if" in schema and {"then", "else"} & schema.keys():
        test = at.positive.part(schema["if"], "")
        then, other = (at.part(schema.get(name, True), "") for name in ("then", "else"))
        ways = (test, then), (test.negated, other)
        yield _united((_all_of(map(_shapes, way), at) for way in ways), at)


def _one_of(parts: list[Located], at: Located) -> list[Shape]:
    found = [*map(_shapes, parts)]
    if not at.holds:
        pairs = (_product(a, b, at) for a, b in itertools.combinations(found, 2))
        none = _all_of((_shapes(each.negated) for each in parts), at)
        return _united([none, *pairs], at)
    alone = []
    for i, shapes in enumerate(found):
        for j, others in enumerate(found):
            if i != j and any(map(_may_exist, _product(shapes, others, at))):
                shapes = _product(shapes, _shapes(parts[j].negated), at)
        alone.append(shapes)
    return _united(alone, at)


def _may_exist(shape: Shape, depth: int = 4) -> bool:
    """Whether a shape may have a value, as far as it is easily seen."""
    others = shape._replace(array=None, object=None)
    if not others.is_empty or depth == 0:
        return True

    def is_possible(together: Together) -> bool:
        return any(_may_exist(each, depth - 1) for each in shapes_of(together))

    if (found := shape.object) is not None:
        return all(is_possible(schemas_of_name(found, name)) for name in found.required)
    array = shape.array
    assert array is not None
    return all(is_possible(schemas_of_item(array, i)) for i in range(min(array.least, 8)))


def schemas_of_name(objects: Objects, name: str) -> Together:
    """The schemas of the property of a name."""
    found: list[Located] = []
    for rule in objects.rules:
        own = [schema for each, schema in rule.named if each == name]
        own += [schema for pattern, schema in rule.patterns if pattern.matches(name)]
        found += own or ([] if rule.others is None else [rule.others])
    return tuple(found)


def schemas_of_item(arrays: Arrays, index: int) -> Together:
    """The schemas of an item."""
    found: list[Located] = []
    for rule in arrays.rules:
        if index < len(rule.first):
            found.append(rule.first[index])
        elif rule.others is not None:
            found.append(rule.others)
    return tuple(found)


def _reference(at: Located) -> list[Shape]:
    inner = at.referred()
    if inner.inside.count(inner.inside[-1]) > _MOST_REFERENCES:
        return []  # holds or not: there may be more, which is not followed
    return _shapes(inner)


def _of_types(at: Located) -> Iterator[list[Shape]]:
    if "type" not in at.schema:
        return
    names = at.schema["type"]
    names = names if isinstance(names, list) else [names]
    for name in names:
        if name not in _TYPES:
            raise ValueError(f"{at.where} has the unknown type {shown(name)}")
    one: dict[str, Any] = EVERYTHING._asdict()
    own = {"boolean": "booleans", "integer": "number"}
    holds = {field: one[field] for field in (own.get(name, name) for name in map(str, names))}
    fails = {field: value for field, value in one.items() if field not in holds}
    if "integer" in names and "number" not in names:
        holds["number"], fails["number"] = numbers.INTEGERS, numbers.FRACTIONS
    yield [Shape(**(holds if at.holds else fails))]


def _of_values(at: Located) -> Iterator[list[Shape]]:
    """Given values."""
    for name in at.schema.keys() & {"enum", "const"}:
        values = at.schema[name] if name == "enum" else [at.schema[name]]
        if not isinstance(values, list):
            raise ValueError(f"'enum' of {at.where} must be a list of values, got {shown(values)}")
        plain = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if not all(map(math.isfinite, plain)):
            raise ValueError(f"{name!r} of {at.where} has a number that is none in JSON")
        texts = [each for each in values if isinstance(each, str)]
        for text in texts:
            at.check_text(text)
        booleans = frozenset(each for each in values if isinstance(each, bool))
        strings = Strings(Choice(tuple(map(literal, texts))))
        nested = [_as_schema(each) for each in values if isinstance(each, list | Mapping)]
        parts = [_shapes(at.part(each, "")) for each in nested]
        if at.holds:
            number = numbers.equal_to(plain) if plain else None
            flat = Shape(None in values, booleans, number, strings if texts else None)
            yield _united([[flat], *parts], at)
            continue
        others = numbers.ANY
        for value in plain:
            others &= numbers.other_than(value)
        flat = EVERYTHING._replace(
            null=None not in values,
            booleans=EVERYTHING.booleans - booleans,
            number=None if others.is_empty else others,
            string=Strings(ANYTHING - strings.set),
        )
        yield _all_of([[flat], *parts], at)


def _as_schema(value: Any) -> dict[str, Any]:
    """The schema of one array or object."""
    if isinstance(value, list):
        size, items = len(value), [{"const": each} for each in value]
        return {"type": "array", "minItems": size, "maxItems": size} | (
            {"prefixItems": items} if items else {}
        )
    return {
        "type": "object",
        "properties": {name: {"const": each} for name, each in value.items()},
        "required": [*value],
        "maxProperties": len(value),
    }


_BOUNDS = {
    "minimum": (numbers.above, True, numbers.below),
    "exclusiveMinimum": (numbers.above, False, numbers.below),
    "maximum": (numbers.below, True, numbers.above),
    "exclusiveMaximum": (numbers.below, False, numbers.above),
}


def _of_numbers(at: Located) -> Iterator[list[Shape]]:
    for name, (inside, or_equal, outside) in _BOUNDS.items():
        if name in at.schema:
            bound = at.schema[name]
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ValueError(f"{name} of {at.where} must be a number, got {shown(bound)}")
            if not abs(bound) < 1e300:
                at.refuse(name)
            yield _fact(
                at,
                {"number": inside(bound, or_equal=or_equal)},
                {"number": outside(bound, or_equal=not or_equal)},
            )
    if "multipleOf" in at.schema:
        factor = at.schema["multipleOf"]
        is_whole = isinstance(factor, int | float) and factor == factor // 1 > 0
        if isinstance(factor, bool) or not is_whole or factor > numbers.MOST_FACTOR:
            at.refuse("multipleOf")
        multiples = numbers.multiples_of(int(factor))
        others = numbers.INTEGERS - multiples if factor > 1 else numbers.FRACTIONS
        yield _fact(at, {"number": multiples}, {"number": others})


_SIZES: dict[str, tuple[str, Any]] = {
    "Length": ("string", Strings),
    "Items": ("array", Arrays),
    "Properties": ("object", Objects),
}


def _of_sizes(at: Located) -> Iterator[list[Shape]]:
    for what, (field, kind) in _SIZES.items():
        least, most = at.counts(f"min{what}", f"max{what}")
        if least:
            yield _fact(at, {field: kind(least=least)}, {field: kind(most=least - 1)})
        if most is not None:
            yield _fact(at, {field: kind(most=most)}, {field: kind(least=most + 1)})


def _of_strings(at: Located) -> Iterator[list[Shape]]:
    if "pattern" in at.schema:
        strings = Strings(at.pattern(at.schema["pattern"]))
        if at.holds:
            yield [EVERYTHING._replace(string=strings)]
        else:
            yield [Shape(string=Strings(ANYTHING - strings.set))]
    if "format" in at.schema:
        name = at.schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise ValueError(f"{at.where} has the format {shown(name)}; known: {sorted(FORMATS)}")
        # Of a format a part is known, so nothing is known of what is none.
        yield _fact(at, {"string": Strings(FORMATS[name])})


def _of_arrays(at: Located) -> Iterator[list[Shape]]:
    schema = at.schema
    first = at.parts("prefixItems") if "prefixItems" in schema else []
    rest = at.rest("items", "unevaluatedItems")
    if isinstance(rest, list):
        raise ValueError(f"'items' of {at.where} is a list; draft 2020-12 has 'prefixItems' for it")
    others = None if rest is None else at.part(rest, "[]")
    if first or others is not None:
        each_alone = [*enumerate(first), *([] if others is None else [(len(first), others)])]
        fails = (ItemRule((*[_ANY] * i, each)) for i, each in each_alone)
        yield _fact(
            at,
            {"array": Arrays((ItemRule(tuple(first), others),))},
            *({"array": Arrays((rule,), least=len(rule.first))} for rule in fails),
        )
    if "contains" in schema:
        inner = at.positive.part(schema["contains"], "[]")
        low, most = at.counts("minContains", "maxContains")
        low = low if "minContains" in schema else 1
        outside = [Contained(inner, 0, low - 1)] if low else []
        outside += [] if most is None else [Contained(inner, most + 1)]
        yield _fact(
            at,
            {"array": Arrays(contained=(Contained(inner, low, most),))},
            *({"array": Arrays(contained=(each,))} for each in outside),
        )
    if schema.get("uniqueItems", False):
        yield _fact(at, {"array": Arrays(unique=(at,))})


_ANY = Located(True, "", True, (), None)


def _of_objects(at: Located) -> Iterator[list[Shape]]:
    schema = at.schema
    if required := at.names("required"):
        absent = ({"object": _lacking(name, at)} for name in required)
        yield _fact(at, {"object": Objects(required=tuple(required))}, *absent)
    named = [(name, at.part(each, f".{name}")) for name, each in at.table("properties").items()]
    patterns = [
        (Strings(at.pattern(pattern)).set, at.part(each, f".{pattern}"))
        for pattern, each in at.table("patternProperties").items()
    ]
    rest = at.rest("additionalProperties", "unevaluatedProperties")
    others = None if rest is None else at.part(rest, ".*")
    if named or patterns or others is not None:
        rule = PropertyRule(tuple(named), tuple(patterns), others)
        fails = ({"object": Objects((PropertyRule((each,)),), (each[0],))} for each in named)
        yield _fact(at, {"object": Objects((rule,))}, *fails)
    if "propertyNames" in schema:
        yield _fact(at, {"object": Objects(names=(at.part(schema["propertyNames"], ".*"),))})
    needed = {name: {"required": each} for name, each in at.table("dependentRequired").items()}
    for name, then in [*needed.items(), *at.table("dependentSchemas").items()]:
        shapes = _shapes(at.part(then, ""))
        if at.holds:
            lacking = EVERYTHING._replace(object=_lacking(name, at))
            yield _united([[lacking], shapes], at)
        else:
            yield _product([Shape(object=Objects(required=(name,)))], shapes, at)


def _lacking(name: str, at: Located) -> Objects:
    return Objects((PropertyRule(((name, at.positive.part(False, f".{name}")),)),))


# Of these each yields the values for which a keyword holds, or fails, as the schema does.
_KEYWORDS = (
    _logic,
    _of_types,
    _of_values,
    _of_numbers,
    _of_sizes,
    _of_strings,
    _of_arrays,
    _of_objects,
)
