"""Compiled programs, of which a process has room for some hundred."""

import gc
import threading
from pathlib import Path

import jax

MAPPINGS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
COMPILE = "/jax/core/compile/backend_compile_duration"  # jax's event
_COMPILED = threading.Event()  # since `free_programs` looked


def num_mappings() -> int:
    """Mappings of memory of this process; 0: the system does not say."""
    return MAPPINGS.read_bytes().count(b"\n") if MAPPINGS.is_file() else 0


def free_programs(most: int | None = None) -> None:
    """Frees all compiled programs if this process has more mappings of memory than `most`.

    Linux allows a number of them, and XLA ends a process that takes more. None: three quarters of
    that number.
    """
    if not _COMPILED.is_set():
        return
    _COMPILED.clear()
    mappings = num_mappings()
    if mappings and mappings > (most or int(MOST.read_text()) * 3 // 4):
        jax.clear_caches()
        gc.collect()


jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _COMPILED.set() if event == COMPILE else None
)
