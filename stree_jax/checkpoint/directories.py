"""Directories and files that appear whole or not at all, whenever their writer is killed.

A writer fills `.NAME.partial-*/new` beside its destination and renames it at the end. An old
directory is moved to `.NAME.partial-*/old` first; if the writer is killed before the new one is in
place, `recover` moves it back. One writer at a time works on a destination, with a lock that the
system releases when its process ends: whoever holds it may remove what is there of others.
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
    recover(path)
    if os.path.lexists(path) and not overwrite:
        raise ValueError(f"{path} exists; choose another name or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_errors(path), _only_writer(path) as work:
        new = work / "new"
        new.mkdir()
        yield new
        if not os.path.lexists(path):
            os.rename(new, path)
        elif not overwrite:
            raise ValueError(f"{path} appeared in the meantime; choose another name")
        else:
            os.rename(path, work / "old")
            os.rename(new, path)  # if this fails, `_clean` moves the old one back


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """The path of a file to write: renamed to `path` if the block succeeds, else deleted."""
    path = path.absolute()
    with named_errors(path), _only_writer(path) as work:
        yield work / "new"
        os.replace(work / "new", path)


def write_text(path: Path, text: str) -> Path:
    """Writes a file that appears whole or not at all; returns its path."""
    with new_file(path) as new:
        new.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Gives an error of the system that names no file, such as that of a full disk, this name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else a name would replace its message
            error.filename = error.filename or os.fspath(path)
        raise


def recover(path: Path) -> None:
    """Moves a directory back that a killed process was about to replace."""
    path = path.absolute()
    if not os.path.lexists(path) and any(os.path.lexists(work / "old") for work in _works(path)):
        with contextlib.suppress(OSError), _only_writer(path):
            pass  # a live writer has finished, or what a dead one left is cleaned up


@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[Path]:
    """A new work directory, with the lock of a destination; cleans up before and after."""
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"the name of {shown_path(path)} is too long; choose a shorter one")
    file = path.with_name(f"{_prefix(path)}lock")
    lock = filelock.FileLock(file)
    with contextlib.suppress(OSError, NotImplementedError):  # as some network file systems answer
        lock.acquire()
    try:
        _clean(path)
        yield Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
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
