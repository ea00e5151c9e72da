"""Refuses requests before a process has as many memory mappings as Linux allows.

XLA maps each program that it compiles for a CPU in many pieces, and at the limit it ends the
process, without an exception. So a request is refused while there is room for its programs.
"""

import collections
from pathlib import Path

import jax

MAPPINGS = Path("/proc/self/maps")  # a line each
LIMIT = Path("/proc/sys/vm/max_map_count")  # Linux's own is 65,530
_EVENT = "/jax/core/compile/backend_compile_duration"
_EVERY = 16  # programs after which mappings are counted, which takes milliseconds
_ROOM = 8  # an eighth of the limit is left to the programs of one request

_compiled = collections.Counter[str]()  # events since mappings were counted


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    _compiled[event] += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_count)


def num_mappings() -> int:
    """Of this process, on Linux."""
    return MAPPINGS.read_bytes().count(b"\n")


def check_mappings() -> None:
    """Refuses to go on where the next programs might reach the limit."""
    if _compiled[_EVENT] < _EVERY or not LIMIT.is_file():
        return
    have, most = num_mappings(), int(LIMIT.read_text())
    if have > most - most // _ROOM:
        raise ValueError(
            f"this process has {have} memory mappings, most of them of compiled programs, and Linux"
            f" allows {most}; call jax.clear_caches() and try again: what is needed is compiled"
            " again, and texts do not change"
        )
    _compiled.clear()
