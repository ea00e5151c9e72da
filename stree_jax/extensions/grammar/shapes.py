"""Constraints of JSON values by type, and their intersections."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from stree_jax.extensions.grammar.expressions import Expression
from stree_jax.extensions.grammar.located import Located

# Schemas that all hold; of none, anything does.
Together: TypeAlias = tuple[Located, ...]
# Expressions that all match: what is between the quotes of a string, or a number; of none, any.
Texts: TypeAlias = tuple[Expression, ...]


class Rule(NamedTuple):
    """Schemas of items by index, or properties by name, and of others."""

    by_key: Mapping[Any, Located]
    others: Located | None = None


class Arrays(NamedTuple):
    """Arrays: rules that all hold, and numbers of items."""

    rules: tuple[Rule, ...] = ()
    least: int = 0
    most: int | None = None


class Objects(NamedTuple):
    """Objects: rules that all hold, and names that are there."""

    rules: tuple[Rule, ...] = ()
    required: tuple[str, ...] = ()


def schemas_of(rules: tuple[Rule, ...], key: int | str | None) -> Together:
    """Returns the schemas of an item or a property; None: of others."""
    schemas = (rule.by_key.get(key, rule.others) for rule in rules)
    return tuple(schema for schema in schemas if schema is not None)


class Shape(NamedTuple):
    """Values of each type; None or empty: no value of this type."""

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    number: Texts | None = None
    string: Texts | None = None
    array: Arrays | None = None
    object: Objects | None = None


NOTHING = Shape()
EVERYTHING = Shape(True, frozenset([False, True]), (), (), Arrays(), Objects())


def both(a: Shape, b: Shape) -> Shape:
    """Returns the values of two shapes."""
    return Shape(
        null=a.null and b.null,
        booleans=a.booleans & b.booleans,
        number=_met(a.number, b.number),
        string=_met(a.string, b.string),
        array=_met(a.array, b.array),
        object=_met(a.object, b.object),
    )


def _met(a: Any, b: Any) -> Any:
    """Returns the values of one type in both; None: no value."""
    if a is None or b is None:
        return None
    if isinstance(a, Objects):
        return Objects(a.rules + b.rules, (*dict.fromkeys(a.required + b.required),))
    if not isinstance(a, Arrays):
        return (*dict.fromkeys(a + b),)
    least = max(a.least, b.least)
    most = min((most for most in (a.most, b.most) if most is not None), default=None)
    is_empty = most is not None and most < least
    return None if is_empty else Arrays(a.rules + b.rules, least, most)
