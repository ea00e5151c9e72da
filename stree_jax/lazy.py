"""Names that a module imports when they are first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(module: str, table: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module with names that other modules define.

    Args:
        module: `__name__` of the module.
        table: the module that defines each name; a name may also be that module itself.
    """

    def getattr_(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = importlib.import_module(table[name])
        value = found if table[name].endswith(f".{name}") else getattr(found, name)
        setattr(sys.modules[module], name, value)  # the next access bypasses `__getattr__`
        return value

    return getattr_
