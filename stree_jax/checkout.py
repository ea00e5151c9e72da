"""Finds `stree_jax.convert` when the library runs from a checkout.

The folder is `convert/`, next to `stree_jax/`. A wheel ships it as `stree_jax/convert/`.
Python puts the current folder before installed packages: in a checkout the library is the folder
`stree_jax/`, which has no `convert`, whatever is installed.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

_NAME = "stree_jax.convert"
_FOLDER = Path(__file__).parents[1] / "convert"


class _Finder:
    """Finds one package, the `convert/` of this checkout."""

    @staticmethod
    def find_spec(
        name: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        return importlib.util.spec_from_file_location(
            name, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
        )


def find_convert() -> None:
    """Lets `import stree_jax.convert` find the checkout's converter; a no-op in a wheel."""
    shipped = Path(__file__).with_name("convert") / "__init__.py"
    if not shipped.is_file() and _FOLDER.joinpath("__init__.py").is_file():
        # First: an editable install of another checkout has a finder for this name too.
        sys.meta_path.insert(0, _Finder)
