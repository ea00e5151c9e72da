"""Tasks and sections of a GPU run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]


class Task(NamedTuple):
    """One row of results.

    Attributes:
        name: unique in its section.
        prepare: compiles, and does all that is not timed; runs in a thread beside others.
        measure: takes the result of `prepare`, and returns the row.
    """

    name: str
    prepare: Callable[[], Any] = lambda: None
    measure: Callable[[Any], Row] = lambda row: row


class Section(NamedTuple):
    """A part of a run, with a process of its own.

    Attributes:
        tasks: function of the options of the run and the rows of an earlier attempt; the most
            important tasks come first.
        weight: share of the time, relative to the other sections.
        together: number of tasks that are prepared at a time.
        timed: nothing is prepared while a task is measured.
        seconds: limit for measuring a timed task; beyond it the task hangs.
    """

    tasks: Callable[[Mapping[str, Any], Sequence[Row]], Iterable[Task]]
    weight: float
    together: int = 8
    timed: bool = True
    seconds: float = 60.0
