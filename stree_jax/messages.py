"""Values in error messages."""

import os
import re

__all__ = ["first_line", "needs", "printable", "shown", "shown_path"]


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


def needs(what: str, package: str, extra: str) -> str:
    """Says that an optional package is missing, and how to install it."""
    return f"{what} needs {package}; in the clone: pip install '.[{extra}]'"


def first_line(error: BaseException) -> str:
    """The first line of an error message, at most 200 characters and without addresses."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:10_000]
    text = re.sub(r"( See [^<]*)?<[^<>]* at 0x[^<>]*>|(?<= )at 0x[0-9a-f]+", "", text)
    text = printable(text)
    return text if len(text) <= 200 else text[:200] + "..."


def _cut(text: str, most: int) -> str:
    text = printable(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."
