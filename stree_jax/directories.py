"""Directories that appear whole or not at all, whenever the process that writes them is killed.

A writer fills `.NAME.partial-*/new` next to the destination and renames it at the end. It holds a
lock on `.NAME.partial-*/lock`, which the system releases when its process ends. Replacing swaps old
and new in one step where the system can (Linux's `renameat2`). Elsewhere the old one is moved to
`.NAME.partial-*/old` first; if the writer is killed before the new one is in place, `recover` moves
it back.
"""

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stree_jax.messages import shown_path

try:
    import fcntl
except ImportError:  # Windows: nothing is removed or recovered
    fcntl = None  # type: ignore[assignment]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_LONGEST_NAME = 255 - len("..partial-") - 8  # bytes: `_work_directory` adds these


@contextlib.contextmanager
def new_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory: renamed to `path` if the block succeeds, else deleted.

    Leftovers of killed processes are removed first.

    Raises:
        ValueError: `path` exists and `overwrite` is False, or its name is too long.
        OSError: it cannot be written; names the file, or else `path`.
    """
    path = path.absolute()
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"the name of {shown_path(path)} is too long; choose a shorter one")
    recover(path)
    if os.path.lexists(path) and not overwrite:
        raise ValueError(f"{path} exists; choose another name or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    with _work_directory(path) as work:
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
        elif not _exchange(new, path):
            os.rename(path, old)
            os.rename(new, path)  # if this fails, `_clean` moves the old one back


def recover(path: Path) -> None:
    """Moves a directory back that a killed process was about to replace."""
    path = path.absolute()
    if os.path.lexists(path):
        return
    for work in _leftovers(path):
        if os.path.lexists(work / "old"):
            with _locked(work, wait=True) as locked:  # waits for a live writer to finish
                if locked:
                    _clean(work, path)


def _remove_leftovers(path: Path) -> None:
    for work in _leftovers(path):
        with _locked(work, wait=False) as locked:
            if locked:
                _clean(work, path)
        # Empty: a process was killed before it made a lock. Else Orbax's threads wrote after a
        # save that had failed.
        if not os.path.lexists(work / "lock"):
            shutil.rmtree(work, ignore_errors=True)


def _leftovers(path: Path) -> list[Path]:
    if not path.parent.is_dir():
        return []
    pattern = re.compile(re.escape(_prefix(path)) + r"\w+")
    return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]


def _prefix(path: Path) -> str:
    return f".{path.name}.partial-"


@contextlib.contextmanager
def _work_directory(path: Path) -> Iterator[Path]:
    """A new directory next to `path` with a lock that this process holds."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
        with contextlib.suppress(FileNotFoundError):
            (work / "lock").touch()
        with _locked(work, wait=True):
            if not os.path.lexists(work / "lock"):
                continue  # another process took it for a leftover before it was locked
            try:
                yield work
            finally:
                _clean(work, path)
            return


def _clean(work: Path, path: Path) -> None:
    """Deletes a work directory; the old one is moved back unless `path` exists again.

    The lock goes last: a process that is killed here leaves a directory with a lock or an empty
    one.
    """
    new, old = work / "new", work / "old"
    if os.path.lexists(old) and not os.path.lexists(path):
        os.rename(old, path)
    for part in (new, old):
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            part.unlink()  # a file or a link was replaced
    # After a failed save Orbax's threads may still write: the lock stays for the next writer.
    if not (os.path.lexists(new) or os.path.lexists(old)):
        shutil.rmtree(work, ignore_errors=True)


def try_lock(file: int) -> bool:
    """Locks an open file until it is closed or its process ends. False: another one has the lock.

    Where there are no locks (Windows, some network file systems) every call succeeds.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _locked(work: Path, *, wait: bool) -> Iterator[bool]:
    """Locks a work directory. False: another process has the lock, or there are no locks."""
    try:
        if fcntl is None:
            raise OSError
        lock = os.open(work / "lock", os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = os.path.lexists(work / "lock")
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(lock)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two paths in one step; False if the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0
