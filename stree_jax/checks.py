"""Checks of arguments and of the fields of configs."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from stree_jax.messages import shown

__all__ = [
    "check_int",
    "check_names",
    "lacking",
    "require",
    "require_integer",
    "require_types",
]  # what an extension may use

_LARGEST = float(np.finfo(np.float32).max)


def check_int(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """The value as an int; flags and floats are refused, NumPy's integers are not.

    Raises:
        ValueError: not an integer from `low` to `high`; the message says which argument.
    """
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    number = int(value) if is_int else 0  # type: ignore[call-overload]
    if is_int and (low is None or low <= number) and (high is None or number <= high):
        return number
    span = "" if low is None else f", at least {low}" if high is None else f", from {low} to {high}"
    raise ValueError(f"{name} must be an integer{span}; got {shown(value)}")


def is_number(value: object) -> bool:
    """True if a value is a finite number in float32 too; a flag is none."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and bool(-_LARGEST <= value <= _LARGEST)  # type: ignore[operator]


def is_above_zero(value: object) -> bool:
    """True if a value is a number above 0, also in float32, where XLA makes tiny ones 0."""
    return is_number(value) and bool(value >= np.finfo(np.float32).tiny)  # type: ignore[operator]


def check_names(name: str, value: object) -> set[str]:
    """The strings in a list, tuple or set; one string alone is refused.

    Raises:
        ValueError: something else; the message says which argument.
    """
    if isinstance(value, list | tuple | set | frozenset) and all(
        isinstance(each, str) for each in value
    ):
        return {*value}
    raise ValueError(f"{name} must be a list of names, got {shown(value)}")


def lacking(value: object, protocol: type) -> str:
    """Returns what an object lacks of a protocol, as the end of a message."""
    names = [name for name in vars(protocol) if not name.startswith("_")]
    without = [name for name in names if not hasattr(value, name)]
    return f"; it has no {' and no '.join(without)}" if 0 < len(without) < len(names) else ""


def require(condition: bool, message: str) -> None:
    """Raises a ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_integer(
    config: Any, name: str, least: int, *, optional: bool = False, bits: int = 31
) -> None:
    """A field must be an integer from `least` on below `2 ** bits`, or None if it is optional."""
    value = getattr(config, name)
    if value is None and optional:
        return
    check_int(name, value, least)
    require(value < 1 << bits, f"{name} must be below 2**{bits}, got {shown(value)}")


def require_types(cls: type, values: MutableMapping[str, Any]) -> None:
    """Fields of a dataclass must have their annotated types, and numbers must fit in float32.

    `dt_limit` may be infinite. Integers in fields of floats become floats: jax takes an integer for
    an int32.
    """
    for field in dataclasses.fields(cls):
        if field.name not in values:
            continue
        value = values[field.name]
        most = math.inf if field.name == "dt_limit" else _LARGEST
        require(
            _fits(value, field.type, most),
            f"{field.name} must be {getattr(field.type, '__name__', field.type)}"
            f"{' and finite' if field.type is float else ''}, got {shown(value)}",
        )
        values[field.name] = _with_floats(value, field.type)


def _with_floats(value: Any, kind: Any) -> Any:
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        kinds = parts[:1] * len(value) if ... in parts else parts
        return tuple(map(_with_floats, value, kinds))
    is_number = kind is float or (float in parts and int not in parts and value is not None)
    return float(value) if is_number else value


def _fits(value: Any, kind: Any, most: float) -> bool:
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, part, most) for part in parts)
    if typing.get_origin(kind) is tuple:
        kinds = parts[:1] * len(value) if ... in parts and isinstance(value, tuple) else parts
        return (
            isinstance(value, tuple)
            and len(value) == len(kinds)
            and all(map(_fits, value, kinds, [most] * len(kinds)))
        )
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and -most <= value <= most
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
