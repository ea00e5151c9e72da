"""Tasks and sections of a GPU run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]


class Task(NamedTuple):
    """One row of results; its name is unique in its section.

    `prepare` compiles, and does all that is not timed, in a thread beside others; `measure` takes
    its result, and returns the row.
    """

    name: str
    prepare: Callable[[], Any] = lambda: None
    measure: Callable[[Any], Row] = lambda row: row


class Section(NamedTuple):
    """A part of a run, with its own process."""

    # Of the options of the run and the rows of an earlier attempt; the most important come first.
    tasks: Callable[[Mapping[str, Any], Sequence[Row]], Iterable[Task]]
    weight: float  # share of the time, relative to the other sections
    together: int = 8  # tasks that are prepared at a time; nothing is measured meanwhile
    seconds: float = 60.0  # limit for measuring a task; beyond it the task hangs
