"""Parts of a long run that share its time, so that it ends in time and says what it left out."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Clock:
    """The time that a section has, and what it had none for."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def fits(self, what: str) -> bool:
        """Whether there is time to begin something; if not, it is noted as left out."""
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        return False


class Section(NamedTuple):
    """A part of the session.

    Attributes:
        name: of its results.
        weight: of its share of the time.
        run: measures; raises if it cannot.
    """

    name: str
    weight: float
    run: Callable[[Clock], Any]


def run_sections(
    sections: Sequence[Section], seconds: float, results: dict[str, Any], save: Callable[[], Any]
) -> None:
    """Runs sections one after the other, each with its share of the time that is left.

    Notes in `results["sections"]` how long each took, what it left out and what failed; a failure
    does not keep the others from running.
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
