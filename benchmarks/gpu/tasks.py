"""What a section of a GPU run consists of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]


class Task(NamedTuple):
    """One row of results.

    Attributes:
        name: unlike those of the other tasks of a section.
        measure: takes what `prepare` has returned, and returns the row.
        prepare: compiles, and does all that is not timed; runs in a thread beside others.
    """

    name: str
    measure: Callable[[Any], Row]
    prepare: Callable[[], Any] = lambda: None


class Section(NamedTuple):
    """A part of a run, with a process of its own.

    Attributes:
        tasks: in order of importance, from the options of the run and the rows that are there from
            an earlier attempt.
        weight: its share of the time, relative to the others.
        together: tasks that are prepared at a time.
        timed: nothing is prepared while a task is measured.
        seconds: a timed task that is measured for longer hangs.
    """

    tasks: Callable[[Mapping[str, Any], Sequence[Row]], Iterable[Task]]
    weight: float
    together: int = 8
    timed: bool = True
    seconds: float = 60.0
