"""What a JSON value may be: constraints of each type, and their intersections."""

from typing import Any, NamedTuple, TypeAlias

from stree_jax.extensions.grammar.expressions import Expression
from stree_jax.extensions.grammar.located import Located

# Schemas that all hold; of none, anything does.
Together: TypeAlias = tuple[Located, ...]
# Expressions that all match: what is between the quotes of a string, or a number; of none, any.
Texts: TypeAlias = tuple[Expression, ...]


class ItemRule(NamedTuple):
    """Schemas of the first items, and of the others."""

    first: Together
    others: Located | None = None


class Arrays(NamedTuple):
    """Arrays: rules that all hold, and numbers of items."""

    rules: tuple[ItemRule, ...] = ()
    least: int = 0
    most: int | None = None

    def schemas_of(self, index: int) -> Together:
        """Returns the schemas of an item."""
        own = (rule.first[index : index + 1] or (rule.others,) for rule in self.rules)
        return tuple(schema for each in own for schema in each if schema is not None)


class PropertyRule(NamedTuple):
    """Schemas of properties by name, and of all others."""

    named: dict[str | None, Located]
    others: Located | None = None


class Objects(NamedTuple):
    """Objects: rules that all hold, and names that are there."""

    rules: tuple[PropertyRule, ...] = ()
    required: tuple[str, ...] = ()

    def schemas_of(self, name: str | None) -> Together:
        """Returns the schemas of the property of a name; None: one that no rule names."""
        own = (rule.named.get(name, rule.others) for rule in self.rules)
        return tuple(schema for schema in own if schema is not None)


class Shape(NamedTuple):
    """What a value of each type may be; None or empty: no value of this type."""

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    number: Texts | None = None
    string: Texts | None = None
    array: Arrays | None = None
    object: Objects | None = None


EVERYTHING = Shape(True, frozenset([False, True]), (), (), Arrays(), Objects())


def both(a: Shape, b: Shape) -> Shape:
    """Returns the values of two shapes."""
    others = (
        None if one is None or other is None else _met(one, other)
        for one, other in zip(a[2:], b[2:], strict=True)
    )
    return Shape(a.null and b.null, a.booleans & b.booleans, *others)


def _met(a: Any, b: Any) -> Any:
    """Returns the values of one type that are in both; None: there is none."""
    if isinstance(a, Objects):
        return Objects(a.rules + b.rules, (*dict.fromkeys(a.required + b.required),))
    if not isinstance(a, Arrays):
        return (*dict.fromkeys(a + b),)
    least = max(a.least, b.least)
    most = min((each for each in (a.most, b.most) if each is not None), default=None)
    is_empty = most is not None and most < least
    return None if is_empty else Arrays(a.rules + b.rules, least, most)
