"""The persistent compilation cache of the command, and of Python programs that switch it on.

Each process would compile the same programs again. The cache can only make it faster: a folder that
cannot be used and an entry that cannot be read count as absent. Its programs run as the user, so a
folder that others may change is not used, and a warning says so.
"""

import contextlib
import os
import re
import stat
import warnings
from pathlib import Path
from typing import Any

import jax

MAX_BYTES = 256 * 2**20

_ENTRY = re.compile(r".+-[0-9a-f]{64}-cache")  # jax's file names
_FAILURE = r"Error (reading|writing) persistent compilation cache entry for '(.+?)'"


def enable_compilation_cache() -> None:
    """Makes jax keep compiled programs in the user's cache folder, as the command does.

    The folder is `stree-jax/xla` in `$XDG_CACHE_HOME` or `~/.cache`. `STREE_JAX_CACHE` names
    another folder, or is `off`. No-op if the user configured jax's own cache, or if the folder
    cannot be created; if others may change what is in it, with a warning. Call it before anything
    is compiled. It keeps at most 256 MiB, of all programs of this process, hides jax's warnings
    about the cache, and on a CPU jax's log.
    """
    config: Any = jax.config  # its options have no type annotations
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = _folder()
    if folder is None:
        return
    _evict(folder)
    _repair_silently(folder)
    config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: there are dozens of them, and together they take a second.
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # XLA's own autotuning cache has neither a size limit nor jax's error handling, and jax 0.10
    # makes its path part of every key.
    config.update("jax_persistent_cache_enable_xla_caches", "none")
    # On many CPUs XLA logs an error for each program it loads: it mistakes LLVM's tuning flags
    # (+prefer-no-gather) for features that the host lacks (github.com/openxla/xla/issues/44565).
    # Programs of other hosts are never loaded: the host's features are part of the key.
    if jax.default_backend() == "cpu" and config.jax_logging_level == "NOTSET":
        config.update("jax_logging_level", "CRITICAL")


def _folder() -> Path | None:
    """The cache folder, which exists and is private; None: the cache is off, or there is none."""
    choice = os.environ.get("STREE_JAX_CACHE", "")
    if choice.lower() == "off":
        return None
    try:
        if choice:
            folder = Path(choice).expanduser().absolute()
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            if not base.is_absolute():  # to be ignored, says the XDG specification
                home = Path.home()
                if not home.is_dir():
                    return None
                base = home / ".cache"
            folder = base / "stree-jax" / "xla"
        # Private: whoever writes to this folder runs code as the user.
        for part in (*reversed(folder.parents), folder):
            part.mkdir(mode=0o700, exist_ok=True)
        risk = _risk(folder)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home; ValueError: a null byte
        return None
    if risk is None:
        return folder
    warnings.warn(
        f"compiled programs are not cached: {risk}, and programs from there run as you; remove it,"
        " make it private (chmod go-w), or name another folder in STREE_JAX_CACHE",
        stacklevel=3,
    )
    return None


def _risk(folder: Path) -> str | None:
    """Who else may change the files in a folder, or put another in its place; None: nobody."""
    if os.name != "posix":
        return None
    user, real = os.geteuid(), folder.resolve()
    for part in dict.fromkeys((folder, *folder.parents, real, *real.parents)):
        status, is_cache = part.lstat(), part in (folder, real)
        if status.st_uid != user and (is_cache or status.st_uid != 0):
            return f"{part} belongs to user {status.st_uid}"
        # In a sticky folder, such as /tmp, others cannot rename what is ours.
        is_sticky = status.st_mode & stat.S_ISVTX and not is_cache
        others = 0o002 if _is_group_of_one(status.st_gid, user) else 0o022
        if status.st_mode & others and not (is_sticky or stat.S_ISLNK(status.st_mode)):
            return f"others may write to {part}"
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process deletes entries too
            if (owner := entry.lstat().st_uid) != user:
                return f"{entry} belongs to user {owner}"
    return None


def _is_group_of_one(group: int, user: int) -> bool:
    """Whether a group is that of a user alone, as some systems make one for each."""
    import grp  # not on Windows
    import pwd

    try:
        own, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    is_own = group == own.pw_gid and members.gr_name == own.pw_name
    return is_own and {*members.gr_mem} <= {own.pw_name}


def _evict(folder: Path) -> None:
    """Deletes the least recently read entries until the others fit `MAX_BYTES`.

    jax's own limit (`jax_compilation_cache_max_size`) locks the folder for each read, so a stopped
    process delays every other one by ten seconds a program.
    """
    entries = []
    with contextlib.suppress(OSError):  # unreadable, or another process deletes them too
        for file in os.scandir(folder):
            if _ENTRY.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                stat = file.stat()
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, file.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= MAX_BYTES:
                break
            os.unlink(path)
            total -= size


def _repair_silently(folder: Path) -> None:
    """Hides jax's warnings about the cache, and deletes entries that jax cannot read.

    jax recompiles what it cannot read but never overwrites a file. An entry that was cut short by a
    full disk would be recompiled by every command.
    """
    show = warnings.showwarning

    def showwarning(message: Warning | str, *arguments: Any, **options: Any) -> None:
        failure = re.match(_FAILURE, str(message))
        if failure is None:
            show(message, *arguments, **options)
        elif failure[1] == "reading":
            # The warning has the first part of the file's name, the name of the program.
            with contextlib.suppress(OSError):
                for entry in folder.glob(f"{failure[2]}-*-cache"):
                    entry.unlink()

    warnings.filterwarnings("always", message=_FAILURE)
    warnings.showwarning = showwarning
