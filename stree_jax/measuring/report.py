"""What was measured, to read: tables, a file of JSON, a picture."""

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.checkpoint.directories import write_text
from stree_jax.checks import require
from stree_jax.measuring.clock import Quartiles
from stree_jax.measuring.record import Record

# Columns of tables.
SPEED = {"tokens/s": "{tokens_per_second[median]:,.0f}", "speed-up": "{speed_up[median]:.2f}x"}
_GREY = "#7d7d7d"
_PAUSE = 20  # seconds between lines of progress


class Table(NamedTuple):
    """A table to print: a row for each record, and a format of a record for each column.

    A narrow terminal gets the first columns alone, `least` of them or more; None: always all.
    """

    title: str
    records: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]
    least: int | None = None
    note: str = ""  # below it

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for most in range(len(self.columns), (self.least or len(self.columns)) - 1, -1):
            grid = self._grid(most)
            if grid.__rich_measure__(console, options).maximum <= options.max_width:
                break
        yield grid

    def _grid(self, most: int) -> Any:
        """The table of the first columns for rich; those of numbers are right-aligned."""
        from rich.table import Table as Grid  # here: `import stree_jax` needs none of it

        without = [*self.columns][most:]
        note = f"no room for {', '.join(without)}" if without else ""
        table = Grid(title=self.title, caption="; ".join(filter(None, [self.note, note])) or None)
        columns = {
            name: [form.format_map(record) for record in self.records]
            for name, form in [*self.columns.items()][:most]
        }
        for name, cells in columns.items():
            is_word = not any(cell[:1].isdigit() for cell in cells)
            table.add_column(name, justify="left" if is_word else "right", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=200).print(self)
        return file.getvalue()


def method_tables(title: str, records: Sequence[Record], **columns: str) -> list[Table]:
    """A table of methods for each temperature; `columns` are formats of additional ones."""
    return [
        Table(
            f"{title}, temperature {temperature:g}",
            [vars(row) | _cells(row) for row in records if row.temperature == temperature],
            {"method": "{method}", **columns, **SPEED, "tau": "{tau:.2f}", "identical": "{same}"}
            | {"quartiles": "{spread}", "nodes": "{nodes}", "ms a call": "{call}"}
            | {"drafting": "{share}", "ms to first token": "{first}", "MB": "{megabytes}"},
            5 + len(columns),
            "speed-up is the median of the rounds' own ratios, not the ratio of two medians",
        )
        for temperature in dict.fromkeys(record.temperature for record in records)
    ]


def acceptance_tables(records: Sequence[Record]) -> list[Table]:
    """What was accepted at each temperature: a row for each category and way, and the mean."""
    has_categories = bool(records[0].by_category)
    columns = {"category": "{category}"} if has_categories else {}
    columns |= {"method": "{method}", **(SPEED if has_categories else {}), "tau": "{tau:.2f}"}
    columns |= {"accepted a call": "{accepted_per_call:.2f}", "by depth": "{depths}"}
    if any(record.calls_by_tree for record in records):
        columns["calls with"] = "{trees}"
    least = 5 if has_categories else 4
    return [
        Table(
            f"Accepted drafts, temperature {temperature:g}",
            _acceptance([row for row in records if row.temperature == temperature]),
            columns,
            least,
        )
        for temperature in dict.fromkeys(record.temperature for record in records)
    ]


def _acceptance(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of a table: for each category, for the mean of categories, and for all texts."""
    rows = [
        _accepted(record.by_category[category]) | {"category": category}
        for category in records[0].by_category
        for record in records
    ]
    rows += [
        {**_accepted(record), **record.mean_of_categories, "depths": ""}
        | {"category": "mean of categories"}
        for record in records
        if record.mean_of_categories
    ]
    return rows + [_accepted(record) | {"category": "all"} for record in records]


def _accepted(record: Record) -> dict[str, Any]:
    """A record, its acceptance by depth and its trees as text."""
    rates = ("-" if rate is None else f"{rate:.0%}" for rate in record.accepted_of_reached)
    calls = (f"{name} {count:,}" for name, count in (record.calls_by_tree or {}).items())
    return vars(record) | {"depths": " ".join(rates), "trees": ", ".join(calls)}


def _cells(record: Record) -> dict[str, str]:
    """Cells of a record."""
    speed, rounds = record.tokens_per_second, len(record.tokens_per_second_by_round)
    return {
        "spread": f"{speed['low']:,.0f} to {speed['high']:,.0f}" if rounds >= 3 else "-",
        "call": _median(record.milliseconds_of_call, ".2f"),
        "share": _median(record.draft_share, ".0%"),
        "first": _median(record.milliseconds_to_first_token, ".1f"),
        "megabytes": "-" if record.memory_bytes is None else f"{record.memory_bytes / 1e6:,.0f}",
        "same": {True: "yes", False: "NO", None: "-"}[record.identical],
    }


def _median(quartiles: Quartiles | None, form: str) -> str:
    """A cell; "-" is what was not measured."""
    return "-" if quartiles is None else format(quartiles["median"], form)


@contextlib.contextmanager
def progress_bar(console: Any = None) -> Iterator[Callable[..., None]]:
    """A bar that goes away; where it cannot be drawn, such as in a file, a line now and then."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    console = console or Console()
    with Bars(console=console, transient=True) as bars:
        task, began, last, now = bars.add_task("", total=1), time.perf_counter(), 0.0, ""

        def show(phase: str, done: int, total: int, note: str = "") -> None:
            nonlocal last, now
            is_new, taken = phase != now, time.perf_counter() - began
            now = phase
            bars.update(task, description=phase + note, completed=done, total=total)
            if not console.is_terminal and (is_new or taken - last >= _PAUSE):
                last, part = taken, "" if is_new else f", {done} of {total}"
                console.print(f"{taken:4.0f} s  {phase}{part}{note}", markup=False, soft_wrap=True)

        yield show


def check_file(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a file to write; refuses what no file can be written to."""
    file = Path(path)
    require(file.parent.is_dir(), f"{file}: the folder {file.parent} does not exist")
    require(not file.is_dir(), f"{file} is a folder; name a file")
    require(file.is_file() or not file.exists(), f"{file} is no regular file; name one")
    return file


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Writes a file that appears whole or not at all; returns its path."""
    return write_text(path, json.dumps(content, indent=1) + "\n")


def draw_speeds(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of the speed of each method at each temperature, with quartiles; tau beside them.

    The rows are records as JSON has them: pictures are drawn from files too.
    """
    # Some methods are for one temperature only.
    names = [*dict.fromkeys(row["method"] for row in rows)]
    temperatures = [*dict.fromkeys(row["temperature"] for row in rows)]
    right, pitch = max(row["speed_up"]["high"] for row in rows) + 0.04, 0.72 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        bars = [row for row in rows if row["temperature"] == temperature]
        places = [names.index(row["method"]) + pitch * number for row in bars]
        low, median, high = zip(*(sorted(row["speed_up"].values()) for row in bars), strict=True)
        label = f"temperature {temperature:g}"
        axes.barh(places, median, height=pitch - 0.04, color=f"C{number}", label=label)
        axes.hlines(places, low, high, color=_GREY)
        for place, row in zip(places, bars, strict=True):
            text = f"{row['speed_up']['median']:.2f}x, tau {row['tau']:.2f}"
            if row["nodes"] == 1:
                text = f"{row['tokens_per_second']['median']:.0f} tokens/s"
            axes.text(right, place, text, va="center", size=9)
    axes.set_yticks([i + (0.72 - pitch) / 2 for i in range(len(names))], names)
    axes.set(title="Tokens per second, no drafts = 1", xticks=(0, 0.5, 1), xlim=(0, right * 1.4))
    axes.set_ylim(len(names) - 0.3, -0.12 - pitch / 2)
    axes.grid(visible=False)
    axes.axvline(1, color=_GREY, linewidth=1, linestyle="--", marker="")
