"""Files of a checkpoint: those that are there, and what lies in their place."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from stree_jax.checks import require
from stree_jax.messages import first_line, shown, shown_path

_POINTER = b"version https://git-lfs.github.com/spec/v1"
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_MAX_TEXT = 16 << 20  # bytes; an index of 100,000 tensors has about 10 MB
_MAX_DEPTH = 32
# Where transformers has chat templates, and where older versions of this library looked for them.
CHAT_TEMPLATES = (
    "chat_template.jinja",
    "chat_templates/*.jinja",
    "additional_chat_templates/*.jinja",
)


def checked_path(path: object, name: str, what: str) -> Path:
    """An argument `name` as a path; ValueError: it is none, and must be `what`."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{name} must be {what}, got {shown(path)}")
    return Path(path)


def has_file(path: Path) -> bool:
    """True if there is a file; ValueError: something else is there, or it cannot be read."""
    start, mode = b"", _mode(path)
    if mode is None:
        return False
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise ValueError(f"{shown_path(path)} is {kind}; a file is expected there")
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise _unreadable(path, error) from None
    if start == _POINTER:
        raise ValueError(
            f"run `git lfs pull` in the clone: {shown_path(path)} is a pointer of Git LFS, not the"
            " file itself"
        )
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise ValueError(
            f"{shown_path(path)} is a web page: download the file itself (on the hub, /resolve/ in"
            " the place of /blob/)"
        )
    require(bool(start), f"{shown_path(path)} is damaged: it is empty; download it again")
    return True


def has_directory(path: Path) -> bool:
    """True if there is a directory; ValueError: it cannot be looked into."""
    mode = _mode(path)
    if mode is None or not stat.S_ISDIR(mode):
        return False
    try:
        os.stat(os.path.join(path, "."))  # needs the permission
    except OSError as error:
        raise _unreadable(path, error) from None
    return True


def folder_of(path: Path) -> Path:
    """The directory of a checkpoint, which may be a GGUF file itself."""
    return path.parent if path.suffix == ".gguf" and path.is_file() else path


def _mode(path: Path) -> int | None:
    """The mode of what is at a path, behind links; None: nothing is there."""
    try:
        return os.stat(path).st_mode
    except ValueError:  # a null byte
        return None
    except OSError as error:
        if error.errno in _ABSENT and not os.path.islink(path):
            return None
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ValueError:
    link = f", a link to {shown(os.readlink(path))}," if os.path.islink(path) else ""
    return ValueError(f"{shown_path(path)}{link} cannot be read: {error.strerror}")


def read_json(path: Path) -> dict:
    """Reads a JSON object, with `Infinity`, which transformers 4 writes; ValueError: damaged."""
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    level: list[Any] = [values]
    for _ in range(_MAX_DEPTH):
        tables = [part.values() if isinstance(part, dict) else part for part in level]
        level = [part for table in tables for part in table if isinstance(part, dict | list)]
    require(not level, f"{path} is damaged: it is nested more than {_MAX_DEPTH} deep")
    return values


def optional_json(path: Path) -> dict:
    """`read_json`; empty where there is no file."""
    return read_json(path) if has_file(path) else {}


def read_text(path: Path) -> str:
    """Reads a text; ValueError: there is none, or one that is too large to be real."""
    require(has_file(path), f"{shown_path(path)}: there is no such file")
    try:
        if (size := path.stat().st_size) > _MAX_TEXT:
            raise ValueError(f"{size} bytes are too many for a config or an index")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown_path(path)} is damaged: {first_line(error)}") from error
