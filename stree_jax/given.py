"""Copies of what a user gives to a chat template, and their sizes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stree_jax.messages import shown

LEVELS = 100  # of lists in lists
ITEM = 8  # characters that an item of a list counts as, beside its own
VALUES = 1_000_000
_PLAIN: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}


class Given:
    """Makes copies of nothing but JSON's types: methods of other objects may do harm.

    Attributes:
        sizes: the size of each list and table, with all that is in it, by the `id` of its copy.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._values = 0

    def copy(self, value: Any, levels: int = LEVELS) -> Any:
        """A copy of a value.

        Raises:
            ValueError: "holds ...", what is no JSON.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        for kind, plain in _PLAIN.items():
            if isinstance(value, kind):
                return plain(value)
        if levels == 0:
            raise ValueError(f"holds lists in lists, more than {LEVELS} deep")
        if isinstance(value, np.generic):
            return self.copy(value.item(), levels - 1)
        copy: Any
        if isinstance(value, Mapping):
            copy = {self.copy(k, 1): self.copy(v, levels - 1) for k, v in value.items()}
        elif isinstance(value, list | tuple):
            copy = [self.copy(part, levels - 1) for part in value]
            copy = copy if isinstance(value, list) else tuple(copy)
        else:
            raise ValueError(
                f"holds {shown(value)}, which is no JSON: use texts, numbers, lists and tables"
            )
        self._values += len(copy)
        if self._values > VALUES:
            raise ValueError(f"holds more than {VALUES} values")
        self.sizes[id(copy)] = sum(map(self.size, parts_of(copy)))
        return copy

    def size(self, copy: Any) -> int:
        """The size of a copy as an item of a list."""
        return ITEM + (len(copy) if isinstance(copy, str) else self.sizes.get(id(copy), 0))


def parts_of(value: Any) -> list[Any]:
    """The items of a list; the keys and values of a table."""
    return [*value, *value.values()] if isinstance(value, dict) else [*value]
