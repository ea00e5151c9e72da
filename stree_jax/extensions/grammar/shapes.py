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

    own: Mapping[Any, Located]
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
    found = (rule.own.get(key, rule.others) for rule in rules)
    return tuple(schema for schema in found if schema is not None)


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
    others = (
        None if one is None or other is None else _met(one, other)
        for one, other in zip(a[2:], b[2:], strict=True)
    )
    return Shape(a.null and b.null, a.booleans & b.booleans, *others)


def _met(a: Any, b: Any) -> Any:
    """Returns the values of one type in both; None: no value."""
    if isinstance(a, Objects):
        return Objects(a.rules + b.rules, (*dict.fromkeys(a.required + b.required),))
    if not isinstance(a, Arrays):
        return (*dict.fromkeys(a + b),)
    least = max(a.least, b.least)
    most = min((each for each in (a.most, b.most) if each is not None), default=None)
    is_empty = most is not None and most < least
    return None if is_empty else Arrays(a.rules + b.rules, least, most)
