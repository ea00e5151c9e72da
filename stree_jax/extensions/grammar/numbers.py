"""JSON numbers as expressions over their characters.

A number with a bound has no exponent, and few digits after the point: so doubles tell it from the
bound.
"""

import json
from collections.abc import Sequence

from stree_jax.extensions.grammar.expressions import Choice, Expression, literal, parse

MOST_BOUND = 10**9
_FRACTION, _NOT_ZERO = r"(\.[0-9]{1,6})?", r"\.[0-9]{0,5}[1-9][0-9]{0,5}"

ANY = parse(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?")
INTEGERS = parse("-?(0|[1-9][0-9]*)")


def equal_to(values: Sequence[int | float]) -> Expression:
    """Returns numbers as JSON writes them; integers also without point and exponent."""
    texts = {json.dumps(value) for value in values}
    texts |= {str(int(value)) for value in values if value == int(value)}
    return Choice(tuple(map(literal, sorted(texts))))


def at_least(bound: int, *, or_equal: bool) -> Expression:
    """Returns the numbers above an integer, or equal to it."""
    if bound >= 0:
        return parse(_above(bound, or_equal=or_equal))
    return parse(f"{_above(0)}|-({_below(-bound, or_equal=or_equal)})")


def at_most(bound: int, *, or_equal: bool) -> Expression:
    """Returns the numbers below an integer, or equal to it."""
    if bound > 0:
        return parse(f"{_below(bound, or_equal=or_equal)}|-({_above(0)})")
    zero = r"|0(\.0{1,6})?" if bound == 0 and or_equal else ""
    return parse(f"-({_above(-bound, or_equal=or_equal)}){zero}")


def _above(bound: int, *, or_equal: bool = True) -> str:
    """Returns the pattern of numbers without a sign that are above one."""
    first = bound if or_equal else bound + 1
    num_digits = len(str(first))
    whole = f"{_between(first, 10**num_digits - 1)}|[1-9][0-9]{{{num_digits},}}"
    return f"({whole}){_FRACTION}" + ("" if or_equal else f"|{bound}{_NOT_ZERO}")


def _below(bound: int, *, or_equal: bool) -> str:
    """Returns the pattern of numbers without a sign that are below one."""
    return f"({_between(0, bound - 1)}){_FRACTION}" + (
        rf"|{bound}(\.0{{1,6}})?" if or_equal else ""
    )


def _between(low: int, high: int) -> str:
    """Returns the pattern of integers from one to another, in blocks.

    Worked example: 38 to 521 are 3[8-9], [4-9][0-9], [1-4][0-9]{2}, 5[0-1][0-9] and 52[0-1].
    """
    parts = []
    while low <= high:
        zeros = 0
        while low and low % 10 ** (zeros + 1) == 0 and low + 10 ** (zeros + 1) - 1 <= high:
            zeros += 1
        head, digit = divmod(low // 10**zeros, 10)
        last = min(9, digit + (high + 1 - low) // 10**zeros - 1)
        parts.append(f"{head or ''}[{digit}-{last}][0-9]{{{zeros}}}")
        low += (last - digit + 1) * 10**zeros
    return "|".join(parts)
