"""Directories and files that appear whole or not at all, whenever their writer is killed.

A writer of a directory fills `.NAME.partial-*/new` beside it and renames it at the end. An old one
is moved to `.NAME.partial-*/old` first; if the writer is killed before the new one is in place,
`recover` moves it back. One process at a time writes to a destination, with a lock that the system
releases when the process ends: whoever holds it may remove what is there of others.
"""

import atexit
import contextlib
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from stree_jax.messages import shown_path

_SPECIAL = re.compile(r"[][*?\\]")
_RANDOM = 8  # letters that tempfile adds
_LONGEST_NAME = 255 - len("..partial-") - _RANDOM  # bytes


@contextlib.contextmanager
def new_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory: renamed to `path` if the block succeeds, else deleted."""
    path = path.absolute()
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"the name of {shown_path(path)} is too long; choose a shorter one")
    recover(path)
    if os.path.lexists(path) and not overwrite:
        raise ValueError(f"{path} exists; choose another name or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(path):
        work = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
        new, old = work / "new", work / "old"
        new.mkdir()
        try:
            yield new
        except OSError as error:  # of a full disk, it names no file
            if error.errno is not None:  # else a name would replace its message
                error.filename = error.filename or str(path)
            raise
        if not os.path.lexists(path):
            os.rename(new, path)
        elif not overwrite:
            raise ValueError(f"{path} appeared in the meantime; choose another name")
        else:
            os.rename(path, old)
            os.rename(new, path)  # if this fails, `_clean` moves the old one back


def recover(path: Path) -> None:
    """Moves a directory back that a killed process was about to replace."""
    path = path.absolute()
    if not os.path.lexists(path) and any(os.path.lexists(work / "old") for work in _works(path)):
        with contextlib.suppress(OSError), _only_writer(path):
            pass  # a live writer has finished, or what a dead one left is cleaned up


@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Holds the lock of a destination, and cleans up before and after."""
    file = path.with_name(f"{_prefix(path)}lock")
    lock = filelock.FileLock(file)
    with contextlib.suppress(OSError, NotImplementedError):  # as some network file systems answer
        lock.acquire()
    try:
        _clean(path)
        yield
    finally:
        _clean(path)
        if lock.is_locked:
            with contextlib.suppress(OSError):  # not on Windows
                file.unlink()  # whoever waits for it makes a new one
            lock.release()


def _clean(path: Path) -> None:
    """Deletes all work directories; the old one is moved back unless `path` exists again."""
    for work in _works(path):
        if os.path.lexists(work / "old") and not os.path.lexists(path):
            os.rename(work / "old", path)
        # After a failed save Orbax's threads may still write: the rest is for the next writer.
        shutil.rmtree(work, ignore_errors=True)


def _works(path: Path) -> list[Path]:
    """The work directories of a destination."""
    return [*path.parent.glob(glob.escape(_prefix(path)) + "?" * _RANDOM)]


def _prefix(path: Path) -> str:
    return f".{path.name}.partial-"


def is_plain(path: Path) -> bool:
    """True if no character means something in Orbax's patterns, or a slash to tensorstore."""
    return not _SPECIAL.search(path.resolve().as_posix())


def plain_path(path: Path) -> Path:
    """A directory by a path that Orbax and tensorstore take as it is: perhaps a link to it."""
    path = path.resolve()
    if is_plain(path):
        return path
    folder = Path(tempfile.mkdtemp(prefix="stree-jax-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if not is_plain(folder):
        raise ValueError(f"set TMPDIR to a path without any of []*?\\, it gives {folder}")
    link = folder / "link"
    link.symlink_to(path, target_is_directory=True)
    return link


def write_text(path: Path, text: str) -> Path:
    """Writes a file that appears whole or not at all; returns its path."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # there only if it could not be written or renamed
