"""The persistent compilation cache of the command, and of Python programs that switch it on."""

import os
from pathlib import Path
from typing import Any

import jax

MAX_BYTES = 256 * 2**20


def enable_compilation_cache() -> None:
    """Makes jax keep compiled programs in the user's cache folder, as the command does.

    The folder is `stree-jax/xla` in `$XDG_CACHE_HOME` or `~/.cache`, for the user alone; its
    programs run as the user. `STREE_JAX_CACHE` names another folder, or is `off`. No-op if the user
    configured jax's own cache, or if the folder cannot be created. Call it before anything is
    compiled. jax keeps at most 256 MiB there. On a CPU it hides jax's log.
    """
    config: Any = jax.config  # its options have no type annotations
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    choice = os.environ.get("STREE_JAX_CACHE", "")
    base = os.environ.get("XDG_CACHE_HOME", "")
    if choice.lower() == "off":
        return
    try:
        base = base if os.path.isabs(base) else "~/.cache"
        folder = Path(choice or f"{base}/stree-jax/xla").expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in folder.glob("*-cache"):  # with one of a killed process jax writes no more
            if not entry.with_name(entry.name.removesuffix("cache") + "atime").exists():
                entry.unlink(missing_ok=True)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home; ValueError: a null byte
        return
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_compilation_cache_max_size", MAX_BYTES)
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
