"""Sections of a long run that share its time: it ends in time, and lists what it left out."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Clock:
    """The time of a section, and what did not fit into it."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def fits(self, what: str) -> bool:
        """Whether there is time to begin something; if not, it is listed as left out."""
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        return False


class Section(NamedTuple):
    """A part of the session.

    Attributes:
        name: of its results.
        weight: its share of the time, relative to the others.
        run: measures; raises if it cannot.
    """

    name: str
    weight: float
    run: Callable[[Clock], Any]


def run_sections(
    sections: Sequence[Section], seconds: float, results: dict[str, Any], save: Callable[[], Any]
) -> None:
    """Runs sections one after the other, each with its share of the remaining time.

    `results["sections"]` says how long each took, what it left out and how it failed; the others
    run after a failure.
    """
    end = time.monotonic() + seconds
    notes = results["sections"] = {}
    for i, section in enumerate(sections):
        began = time.monotonic()
        left = end - began
        share = left * section.weight / sum(later.weight for later in sections[i:])
        clock = Clock(share)
        note: dict[str, Any] = {"allowed_seconds": round(share, 1), "left_out": clock.left_out}
        if left <= 0:
            clock.left_out.append("all of it")
        else:
            print(f"{section.name}: up to {share:.0f} s", flush=True)
            try:
                results[section.name] = section.run(clock)
            except Exception as error:
                note["failed"] = f"{type(error).__name__}: {error!s:.1000}"
            note["seconds"] = round(time.monotonic() - began, 1)
        notes[section.name] = note
        save()
        jax.clear_caches()  # programs hold on to memory
