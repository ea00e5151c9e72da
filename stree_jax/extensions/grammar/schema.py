"""From a JSON schema (draft 2020-12) to the shapes of the values that it validates.

A schema is a conjunction of keywords, each of which holds or fails for a value. Both are written as
alternatives of shapes, so that `not`, `oneOf` and `if` are what they mean. Alternatives that cannot
be written are left out, so a grammar may allow fewer texts than a schema, and never others.
"""

import math
from collections.abc import Callable, Iterator, Mapping
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


_Alternatives = Callable[[], list[Shape]]
# What a keyword means: the values for which it holds, and those for which it fails.
_Fact = tuple[_Alternatives, _Alternatives]


def shapes_of(together: Together) -> list[Shape]:
    """The shapes of the values for which schemas hold together; none: there is no value.

    Raises:
        ValueError: a schema that is malformed, or that cannot be enforced.
    """
    found = [EVERYTHING]
    for at in together:
        found = _product(found, _shapes(at), at)
    return found


def _shapes(at: Located) -> list[Shape]:
    schema = at.schema
    if isinstance(schema, bool):
        return [EVERYTHING] if schema is at.holds else []
    if not isinstance(schema, Mapping):
        raise ValueError(f"{at.where} must be a dictionary, got {shown(schema)}")
    if at.resolver is not None and isinstance(schema.get("$id"), str):
        at = at._replace(resolver=at.resolver.within(schema))
    facts = [*_facts(at)]
    if not at.holds:
        return _united((fails() for _, fails in facts), at)
    found = [EVERYTHING]
    for holds, _ in facts:
        found = _product(found, holds(), at)
    return found


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


def _all_of(parts: list[Located], at: Located) -> list[Shape]:
    found = [EVERYTHING]
    for part in parts:
        found = _product(found, _shapes(part), at)
    return found


def _any_of(parts: list[Located], at: Located) -> list[Shape]:
    return _united(map(_shapes, parts), at)


def _fact(holds: dict[str, Any], *fails: dict[str, Any]) -> _Fact:
    """Of the fields of a shape that differ from others, and shapes for which it fails."""
    return lambda: [EVERYTHING._replace(**holds)], lambda: [Shape(**each) for each in fails]


def _facts(at: Located) -> Iterator[_Fact]:
    """What the keywords of a schema mean."""
    schema = at.schema
    for name in _REFUSED:
        if name in schema:
            at.refuse(name)
    yield from _logic(at)
    if "type" in schema:
        yield _of_types(at)
    for name in ("enum", "const"):
        if name in schema:
            yield _of_values(at, name)
    yield from _of_numbers(at)
    yield from _of_strings(at)
    yield from _of_arrays(at)
    yield from _of_objects(at)


def _logic(at: Located) -> Iterator[_Fact]:
    """References and combinations."""
    schema = at.schema
    if "$ref" in schema:
        yield _reference(at)
    if "allOf" in schema:
        parts = at.parts("allOf")
        yield lambda: _all_of(parts, at), lambda: _any_of([each.negated for each in parts], at)
    if "anyOf" in schema:
        some = at.parts("anyOf")
        yield lambda: _any_of(some, at), lambda: _all_of([each.negated for each in some], at)
    if "oneOf" in schema:
        yield _one_of(at.parts("oneOf"), at)
    if "not" in schema:
        inner = at.part(schema["not"], "")
        yield lambda: _shapes(inner.negated), lambda: _shapes(inner)
    if "if" in schema and {"then", "else"} & schema.keys():
        test, then, other = (at.part(schema.get(name, True), "") for name in ("if", "then", "else"))
        yield _condition(test, then, other, at)


def _condition(test: Located, then: Located, other: Located, at: Located) -> _Fact:
    def chosen(first: Located, second: Located) -> list[Shape]:
        ways = ([test, first], [test.negated, second])
        return _united((_all_of(way, at) for way in ways), at)

    return lambda: chosen(then, other), lambda: chosen(then.negated, other.negated)


def _one_of(parts: list[Located], at: Located) -> _Fact:
    def holds() -> list[Shape]:
        found = [*map(_shapes, parts)]
        alone = []
        for i, shapes in enumerate(found):
            for j, others in enumerate(found):
                if i != j and any(map(_may_exist, _product(shapes, others, at))):
                    shapes = _product(shapes, _shapes(parts[j].negated), at)
            alone.append(shapes)
        return _united(alone, at)

    def fails() -> list[Shape]:
        pairs = [[a, b] for i, a in enumerate(parts) for b in parts[:i]]
        ways = [[each.negated for each in parts], *pairs]
        return _united((_all_of(way, at) for way in ways), at)

    return holds, fails


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


def _reference(at: Located) -> _Fact:
    contents, resolver = at.resolver.lookup(at.schema["$ref"], at.where)
    if at.inside.count(id(contents)) >= _MOST_REFERENCES:
        return (list), (list)  # neither: there may be more, which is not followed
    inner = at._replace(
        schema=contents, holds=True, inside=(*at.inside, id(contents)), resolver=resolver
    )
    return lambda: _shapes(inner), lambda: _shapes(inner.negated)


def _of_types(at: Located) -> _Fact:
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
    return lambda: [Shape(**holds)], lambda: [Shape(**fails)]


def _of_values(at: Located, name: str) -> _Fact:
    """Given values."""
    values = at.schema[name] if name == "enum" else [at.schema[name]]
    if not isinstance(values, list):
        raise ValueError(f"'enum' of {at.where} must be a list of values, got {shown(values)}")
    plain = [
        each for each in values if isinstance(each, int | float) and not isinstance(each, bool)
    ]
    if not all(map(math.isfinite, plain)):
        raise ValueError(f"{name!r} of {at.where} has a number that is none in JSON")
    texts = [each for each in values if isinstance(each, str)]
    for text in texts:
        at.check_text(text)
    booleans = frozenset(each for each in values if isinstance(each, bool))
    strings = Strings(Choice(tuple(map(literal, texts))))
    nested = [at.part(_as_schema(each), "") for each in values if isinstance(each, list | Mapping)]

    def holds() -> list[Shape]:
        flat = Shape(
            None in values,
            booleans,
            numbers.equal_to(plain) if plain else None,
            strings if texts else None,
        )
        return _united([[flat], *map(_shapes, nested)], at)

    def fails() -> list[Shape]:
        others = numbers.ANY
        for value in plain:
            others &= numbers.other_than(value)
        found = EVERYTHING._replace(
            null=None not in values,
            booleans=EVERYTHING.booleans - booleans,
            number=None if others.is_empty else others,
            string=Strings(ANYTHING - strings.set),
        )
        return _product([found], _all_of([each.negated for each in nested], at), at)

    return holds, fails


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


def _of_numbers(at: Located) -> Iterator[_Fact]:
    bounds = {
        "minimum": (numbers.above, True, numbers.below),
        "exclusiveMinimum": (numbers.above, False, numbers.below),
        "maximum": (numbers.below, True, numbers.above),
        "exclusiveMaximum": (numbers.below, False, numbers.above),
    }
    for name, (inside, or_equal, outside) in bounds.items():
        if name in at.schema:
            bound = at.schema[name]
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ValueError(f"{name} of {at.where} must be a number, got {shown(bound)}")
            if not abs(bound) < 1e300:
                at.refuse(name)
            yield _fact(
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
        yield _fact({"number": multiples}, {"number": others})


def _of_strings(at: Located) -> Iterator[_Fact]:
    least, most = at.counts("minLength", "maxLength")
    if least:
        yield _fact({"string": Strings(least=least)}, {"string": Strings(most=least - 1)})
    if most is not None:
        yield _fact({"string": Strings(most=most)}, {"string": Strings(least=most + 1)})
    if "pattern" in at.schema:
        strings = Strings(at.pattern(at.schema["pattern"]))
        yield (
            lambda: [EVERYTHING._replace(string=strings)],
            lambda: [Shape(string=Strings(ANYTHING - strings.set))],
        )
    if "format" in at.schema:
        name = at.schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise ValueError(f"{at.where} has the format {shown(name)}; known: {sorted(FORMATS)}")
        # Of a format a part is known, so nothing is known of what is none.
        yield _fact({"string": Strings(FORMATS[name])})


def _of_arrays(at: Located) -> Iterator[_Fact]:
    schema = at.schema
    least, most = at.counts("minItems", "maxItems")
    if least:
        yield _fact({"array": Arrays(least=least)}, {"array": Arrays(most=least - 1)})
    if most is not None:
        yield _fact({"array": Arrays(most=most)}, {"array": Arrays(least=most + 1)})
    first = at.parts("prefixItems") if "prefixItems" in schema else []
    rest = at.rest("items", "unevaluatedItems")
    if isinstance(rest, list):
        raise ValueError(f"'items' of {at.where} is a list; draft 2020-12 has 'prefixItems' for it")
    others = None if rest is None else at.part(rest, "[]")
    if first or others is not None:
        fails = [ItemRule((*[_ANY] * i, each.negated)) for i, each in enumerate(first)]
        fails += [ItemRule((*[_ANY] * len(first), others.negated))] if others is not None else []
        yield _fact(
            {"array": Arrays((ItemRule(tuple(first), others),))},
            *({"array": Arrays((rule,), least=len(rule.first))} for rule in fails),
        )
    if "contains" in schema:
        inner, counts = at.part(schema["contains"], "[]"), at.counts("minContains", "maxContains")
        low = counts[0] if "minContains" in schema else 1
        outside = [Contained(inner, 0, low - 1)] if low else []
        outside += [] if counts[1] is None else [Contained(inner, counts[1] + 1)]
        yield _fact(
            {"array": Arrays(contained=(Contained(inner, low, counts[1]),))},
            *({"array": Arrays(contained=(each,))} for each in outside),
        )
    if schema.get("uniqueItems", False):
        yield _fact({"array": Arrays(unique=at.where)})


_ANY = Located(True, "", True, (), None)


def _of_objects(at: Located) -> Iterator[_Fact]:
    schema = at.schema
    if required := at.names("required"):
        absent = ({"object": _lacking(name, at)} for name in required)
        yield _fact({"object": Objects(required=tuple(required))}, *absent)
    least, most = at.counts("minProperties", "maxProperties")
    if least:
        yield _fact({"object": Objects(least=least)}, {"object": Objects(most=least - 1)})
    if most is not None:
        yield _fact({"object": Objects(most=most)}, {"object": Objects(least=most + 1)})
    named = [(name, at.part(each, f".{name}")) for name, each in at.table("properties").items()]
    patterns = [
        (Strings(at.pattern(pattern)).set, at.part(each, f".{pattern}"))
        for pattern, each in at.table("patternProperties").items()
    ]
    rest = at.rest("additionalProperties", "unevaluatedProperties")
    others = None if rest is None else at.part(rest, ".*")
    if named or patterns or others is not None:
        fails = (
            {"object": Objects((PropertyRule(((name, each.negated),)),), (name,))}
            for name, each in named
        )
        rule = PropertyRule(tuple(named), tuple(patterns), others)
        yield _fact({"object": Objects((rule,))}, *fails)
    if "propertyNames" in schema:
        yield _fact({"object": Objects(names=(at.part(schema["propertyNames"], ".*"),))})
    for name, needed in at.table("dependentRequired").items():
        yield _if_present(name, at.part({"required": needed}, ""), at)
    for name, inner in at.table("dependentSchemas").items():
        yield _if_present(name, at.part(inner, ""), at)


def _if_present(name: str, then: Located, at: Located) -> _Fact:
    """A schema of objects that have a property."""
    lacking = EVERYTHING._replace(object=_lacking(name, at))
    having = Shape(object=Objects(required=(name,)))
    return (
        lambda: _united([[lacking], _shapes(then)], at),
        lambda: _product([having], _shapes(then.negated), at),
    )


def _lacking(name: str, at: Located) -> Objects:
    return Objects((PropertyRule(((name, at.part(False, f".{name}")),)),))
