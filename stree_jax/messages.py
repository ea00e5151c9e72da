"""Values in error messages."""

import os

__all__ = ["printable", "shown", "shown_path"]


def printable(text: str) -> str:
    """A text in one line: what ends lines, steers terminals or is no character is written out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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
    text = printable(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."
