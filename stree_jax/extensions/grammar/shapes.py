"""What a JSON value may be: constraints of each type, and their intersections."""

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stree_jax.extensions.grammar import numbers
from stree_jax.extensions.grammar.expressions import Expression
from stree_jax.extensions.grammar.graph import ANYTHING, TextSet, set_of

if TYPE_CHECKING:
    from stree_jax.extensions.grammar.located import Located

# Schemas that all hold; of none, anything does.
Together: TypeAlias = tuple["Located", ...]


class Strings(NamedTuple):
    """Strings of a set, with a least and a most number of characters.

    Attributes:
        texts: the set; an expression, as long as it is not joined with others, takes fewer states.
        least, most: numbers of characters; `most` None: without limit.
    """

    texts: TextSet | Expression = ANYTHING
    least: int = 0
    most: int | None = None

    @property
    def set(self) -> TextSet:
        """The texts of any length."""
        return self.texts if isinstance(self.texts, TextSet) else set_of(self.texts)

    def matches(self, text: str) -> bool:
        """Whether a text is one of them."""
        fits = self.least <= len(text) and (self.most is None or len(text) <= self.most)
        return fits and self.set.matches(text)


class ItemRule(NamedTuple):
    """Schemas of the first items, and of the others."""

    first: Together
    others: "Located | None" = None


class Contained(NamedTuple):
    """How many items a schema holds for."""

    schema: "Located"
    least: int = 0
    most: int | None = None


class Arrays(NamedTuple):
    """Arrays; `unique` is where the items must be different."""

    rules: tuple[ItemRule, ...] = ()
    least: int = 0
    most: int | None = None
    contained: tuple[Contained, ...] = ()
    unique: str | None = None


class PropertyRule(NamedTuple):
    """Schemas of properties by name, by pattern of the name, and of all others."""

    named: tuple[tuple[str, "Located"], ...] = ()
    patterns: tuple[tuple[TextSet, "Located"], ...] = ()
    others: "Located | None" = None


class Objects(NamedTuple):
    """Objects; `names` hold for every name."""

    rules: tuple[PropertyRule, ...] = ()
    required: tuple[str, ...] = ()
    names: Together = ()
    least: int = 0
    most: int | None = None


class Shape(NamedTuple):
    """What a value of each type may be; None or empty: no value of this type."""

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    number: TextSet | None = None
    string: Strings | None = None
    array: Arrays | None = None
    object: Objects | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no value."""
        return self == Shape()


EVERYTHING = Shape(True, frozenset([False, True]), numbers.ANY, Strings(), Arrays(), Objects())


def both(a: Shape, b: Shape) -> Shape:
    """The values of two shapes."""
    return Shape(
        a.null and b.null,
        a.booleans & b.booleans,
        _numbers(a.number, b.number),
        _strings(a.string, b.string),
        _arrays(a.array, b.array),
        _objects(a.object, b.object),
    )


def _numbers(a: TextSet | None, b: TextSet | None) -> TextSet | None:
    if a is None or b is None:
        return None
    found = a if b is numbers.ANY else b if a is numbers.ANY else a & b
    return None if found.is_empty else found


def _strings(a: Strings | None, b: Strings | None) -> Strings | None:
    if a is None or b is None:
        return None
    texts = a.texts if b.texts is ANYTHING else b.texts
    if a.texts is not ANYTHING and b.texts is not ANYTHING:
        texts = a.set & b.set
    least, most = max(a.least, b.least), _least_of(a.most, b.most)
    is_empty = isinstance(texts, TextSet) and texts.is_empty
    return None if is_empty or _is_less(most, least) else Strings(texts, least, most)


def _arrays(a: Arrays | None, b: Arrays | None) -> Arrays | None:
    if a is None or b is None:
        return None
    least, most = max(a.least, b.least), _least_of(a.most, b.most)
    if _is_less(most, least):
        return None
    contained = dict.fromkeys(a.contained + b.contained)
    rules = dict.fromkeys(a.rules + b.rules)
    return Arrays((*rules,), least, most, (*contained,), a.unique or b.unique)


def _objects(a: Objects | None, b: Objects | None) -> Objects | None:
    if a is None or b is None:
        return None
    least, most = max(a.least, b.least), _least_of(a.most, b.most)
    required = (*dict.fromkeys(a.required + b.required),)
    if _is_less(most, max(least, len(required))):
        return None
    rules = (*dict.fromkeys(a.rules + b.rules),)
    return Objects(rules, required, (*dict.fromkeys(a.names + b.names),), least, most)


def _least_of(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _is_less(most: int | None, least: int) -> bool:
    return most is not None and most < least
