"""Checks of arguments and of the fields of configs."""

import dataclasses
import numbers
import typing
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from stree_jax.messages import shown

# What an extension may use.
__all__ = ["check_ids", "check_int", "check_names", "require", "require_integer"]

_PLAIN = {bool, int, float, str, type(None)}
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
        isinstance(item, str) for item in value
    ):
        return {*value}
    raise ValueError(f"{name} must be a list of names, got {shown(value)}")


@jax.transfer_guard("allow")
def check_ids(name: str, ids: Any, vocab_size: int, lengths: Any = None) -> None:
    """Refuses an array of other things than token ids; of padded rows `lengths` says how many are.

    The numbers of traced arrays, and of those that other processes hold, are not known: they pass.
    """
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} has {ids.dtype} values; token ids are integers")
    for values in (ids, lengths):
        if isinstance(values, jax.core.Tracer):
            return
        if isinstance(values, jax.Array) and not (
            values.is_fully_addressable or values.is_fully_replicated
        ):
            return
    ids = np.asarray(ids)
    if lengths is not None:
        ids = ids[np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]]
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{name} has token id {outside[0]}, outside the vocabulary of {vocab_size}"
        )


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


def require_integers(config: Any) -> None:
    """Each field of type int must be an integer: from 0 on if that is its default, else from 1 on.

    A field of type `int | None` may be None.
    """
    for field in dataclasses.fields(config):
        if field.type in (int, int | None):
            least, optional = int(field.default != 0), field.type is not int
            require_integer(config, field.name, least, optional=optional)


def plain_fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table as a dataclass has it: with floats where it has floats."""
    fields = dict(values)
    for field in dataclasses.fields(cls):
        kinds = set(typing.get_args(field.type) or (field.type,))
        if field.name not in fields or typing.get_origin(field.type) is tuple or kinds - _PLAIN:
            continue
        value = fields[field.name]
        if type(value) is int and float in kinds and is_number(value):
            value = fields[field.name] = float(value)
        require(
            type(value) in kinds and (type(value) is not float or is_number(value)),
            f"{field.name} must be {getattr(field.type, '__name__', field.type)}"
            f"{' and finite' if float in kinds else ''}, got {shown(value)}",
        )
    return fields
