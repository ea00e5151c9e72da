"""Values in error messages."""

import os

__all__ = ["shown", "shown_path"]


def shown(value: object) -> str:
    """`repr(value)`, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4300 digits, or somebody's `__repr__`
        text = f"<{type(value).__name__}>"
    return _cut(text, 80)


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path, cut to 300 characters."""
    return _cut(os.fspath(path), 300)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
