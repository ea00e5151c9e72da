"""What a JSON value may be: constraints of each type, and their intersections."""

from typing import Any, NamedTuple, TypeAlias

from stree_jax.extensions.grammar import numbers
from stree_jax.extensions.grammar.expressions import Expression
from stree_jax.extensions.grammar.graph import ANYTHING, TextSet, set_of
from stree_jax.extensions.grammar.located import Located

# Schemas that all hold; of none, anything does.
Together: TypeAlias = tuple[Located, ...]


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
    others: Located | None = None


class Contained(NamedTuple):
    """How many items a schema holds for."""

    schema: Located
    least: int = 0
    most: int | None = None


class Arrays(NamedTuple):
    """Arrays; `unique` are the schemas that want different items."""

    rules: tuple[ItemRule, ...] = ()
    least: int = 0
    most: int | None = None
    contained: tuple[Contained, ...] = ()
    unique: Together = ()


class PropertyRule(NamedTuple):
    """Schemas of properties by name, by pattern of the name, and of all others."""

    named: tuple[tuple[str, Located], ...] = ()
    patterns: tuple[tuple[TextSet, Located], ...] = ()
    others: Located | None = None


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
    others = (
        None if one is None or other is None else _met(one, other)
        for one, other in zip(a[2:], b[2:], strict=True)
    )
    return Shape(a.null and b.null, a.booleans & b.booleans, *others)


def _met(a: Any, b: Any) -> Any:
    """The values of one type that are in both; None: there is none."""
    if isinstance(a, TextSet):
        found = a if b is numbers.ANY else b if a is numbers.ANY else a & b
        return None if found.is_empty else found
    joined: dict[str, Any] = {
        name: (*dict.fromkeys(value + getattr(b, name)),)
        for name, value in a._asdict().items()
        if isinstance(value, tuple)
    }
    if isinstance(a, Strings):
        texts = b.texts if a.texts is ANYTHING else a.texts
        if a.texts is not ANYTHING and b.texts is not ANYTHING:
            texts = a.set & b.set
        if isinstance(texts, TextSet) and texts.is_empty:
            return None
        joined["texts"] = texts
    least = max(a.least, b.least)
    most = min((each for each in (a.most, b.most) if each is not None), default=None)
    if most is not None and most < max(least, len(joined.get("required", ()))):
        return None
    return a._replace(**joined, least=least, most=most)
