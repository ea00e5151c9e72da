"""Compiled programs, of which a process has room for some hundred."""

import gc
import threading
from pathlib import Path

import jax

MAPPINGS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
COMPILE = "/jax/core/compile/backend_compile_duration"  # jax's event
_COMPILED = threading.Event()  # since `keep_room` looked
_LEFT = [0]  # mappings that freeing left, which are not of programs


def num_mappings() -> int:
    """Mappings of memory of this process; 0: the system does not say."""
    return MAPPINGS.read_bytes().count(b"\n") if MAPPINGS.is_file() else 0


def free_programs(most: int = 0) -> None:
    """Frees all compiled programs if this process has so many mappings of memory, or if unknown."""
    if (num_mappings() or most) >= most:
        jax.clear_caches()
        gc.collect()
        _LEFT[0] = num_mappings()


def keep_room() -> None:
    """Frees all programs if, with one compiled since, they take three quarters of the room.

    Linux allows a process some mappings of memory, and XLA ends one that takes more.
    """
    if _COMPILED.is_set() and MOST.is_file():
        _COMPILED.clear()
        free_programs((_LEFT[0] + 3 * int(MOST.read_text())) // 4)


jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _COMPILED.set() if event == COMPILE else None
)
