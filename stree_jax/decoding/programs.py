"""Compiled programs, of which a process has room for some hundred."""

import gc
import threading
from pathlib import Path

import jax

MAPPINGS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
COMPILE = "/jax/core/compile/backend_compile_duration"  # jax's event
_COMPILED = threading.Event()  # since `free_programs` looked
_LEFT = [0]  # mappings that it left, which are not of programs


def num_mappings() -> int:
    """Mappings of memory of this process; 0: the system does not say."""
    return MAPPINGS.read_bytes().count(b"\n") if MAPPINGS.is_file() else 0


def free_programs(most: int | None = None) -> None:
    """Frees all compiled programs if they take three quarters of the mappings of memory.

    XLA ends a process that takes more than `most`; None: what Linux allows.
    """
    if not _COMPILED.is_set():
        return
    _COMPILED.clear()
    if mappings := num_mappings():
        room = (most or int(MOST.read_text())) - _LEFT[0]
        if mappings - _LEFT[0] > room * 3 // 4:
            jax.clear_caches()
            gc.collect()
            _LEFT[0] = num_mappings()


jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _COMPILED.set() if event == COMPILE else None
)
