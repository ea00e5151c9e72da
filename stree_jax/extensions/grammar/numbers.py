"""Sets of JSON numbers as automata over their characters."""

import functools
import json
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from stree_jax.extensions.grammar.expressions import RUST, parse
from stree_jax.extensions.grammar.graph import TextSet, minimal, set_of

MOST_FACTOR = 1000
_MOST_DIGITS = 15  # numbers of as many digits are different as doubles
_WHOLE = "(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"


@functools.cache
def _matching(pattern: str) -> TextSet:
    return set_of(parse(pattern, RUST))


ANY = _matching(rf"-?{_WHOLE}{_FRACTION}(?:[eE][+-]?[0-9]{{1,2}})?")
INTEGERS = _matching(f"-?{_WHOLE}")
FRACTIONS = _matching(r"-?(?:0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]")  # no integers


def equal_to(values: Sequence[int | float]) -> TextSet:
    """The numbers as JSON writes them; an integer may be written without point and exponent."""
    texts = {json.dumps(value) for value in values}
    texts |= {str(int(value)) for value in values if value == int(value)}
    return _matching(
        "|".join(text.replace(".", r"\.").replace("+", r"\+") for text in sorted(texts))
    )


def below(bound: int | float, *, or_equal: bool) -> TextSet:
    """The numbers below a bound, or equal to it. They have no exponent."""
    every, size = _comparable(bound)
    if bound > 0 or (bound == 0 and or_equal):
        return every & _matching(f"-.*|{_sizes_below(size, or_equal=or_equal)}")
    too_small = _matching(f"-(?:{_sizes_below(size, or_equal=not or_equal)})")
    return (every & _matching("-.*")) - too_small


def above(bound: int | float, *, or_equal: bool) -> TextSet:
    """The numbers above a bound, or equal to it. They have no exponent."""
    return _comparable(bound)[0] - below(bound, or_equal=not or_equal)


def other_than(value: int | float) -> TextSet:
    """The numbers without an exponent that are not a given one."""
    every = _comparable(value)[0]
    return every - (every - below(value, or_equal=False) - above(value, or_equal=False))


def _comparable(bound: int | float) -> tuple[TextSet, str]:
    """The numbers that are compared with a bound, and the bound's digits.

    They have at most six digits after the point, and fewer where a double would not tell them from
    the bound.
    """
    size = f"{abs(Decimal(repr(bound))):f}"
    digits = max(0, min(6, _MOST_DIGITS - len(size.partition(".")[0])))
    fraction = rf"(?:\.[0-9]{{1,{digits}}})?" if digits else ""
    return _matching(f"-?{_WHOLE}{fraction}"), size


def multiples_of(factor: int) -> TextSet:
    """The integers that a factor divides: the state is the remainder so far."""
    minus, zero, first = 1, 2, 3
    class_of = np.zeros(256, np.int64)
    class_of[[*b"-0123456789"]] = range(1, 12)

    def row(remainder: int | None, sign: int = -1) -> list[int]:
        """From a remainder, or None before the first digit."""
        if remainder is None:
            return [-1, sign, zero, *(first + digit % factor for digit in range(1, 10))]
        return [-1, -1, *(first + (10 * remainder + digit) % factor for digit in range(10))]

    rows = [row(None, minus), row(None), [-1] * 12, *(row(r) for r in range(factor))]
    accepts = [False, False, True, True, *[False] * (factor - 1)]
    return minimal(class_of, np.array(rows), np.array(accepts), np.ones(len(rows), bool))


def _sizes_below(size: str, *, or_equal: bool) -> str:
    """The pattern of the numbers without a sign below one, digit by digit.

    Worked example: below 42.5 are 0 to 9, 1x to 3x, 40, 41, 42 and 42.0x to 42.4x.
    """
    whole, _, fraction = size.partition(".")
    fraction = fraction.rstrip("0")
    parts = [rf"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){_FRACTION}"] if len(whole) > 1 else []
    for i, digit in enumerate(map(int, whole)):
        least = int(i == 0 and len(whole) > 1)
        if digit > least:
            rest = len(whole) - 1 - i
            parts.append(rf"{whole[:i]}[{least}-{digit - 1}][0-9]{{{rest}}}{_FRACTION}")
    for i, digit in enumerate(map(int, fraction)):
        parts.append(rf"{whole}\.{fraction[:i]}" if i else whole)
        if digit:
            parts.append(rf"{whole}\.{fraction[:i]}[0-{digit - 1}][0-9]*")
    if or_equal:
        parts.append(rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(?:\.0+)?")
    return "|".join(parts) or r"[^\x00-\x{10FFFF}]"  # nothing
