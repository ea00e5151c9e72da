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


def method_tables(title: str, rows: Sequence[Mapping[str, Any]], **columns: str) -> list[Table]:
    """A table of methods for each temperature; `columns` are formats of additional ones."""
    shown = [dict(row) | _cells(row) for row in rows]
    return [
        Table(
            f"{title}, temperature {temperature:g}",
            [row for row in shown if row["temperature"] == temperature],
            {"method": "{method}", **columns, **SPEED, "tau": "{tau:.2f}", "identical": "{same}"}
            | {"quartiles": "{spread}", "nodes": "{nodes}", "ms a call": "{call}"}
            | {"drafting": "{share}", "ms to first token": "{first}", "MB": "{megabytes}"},
            5 + len(columns),
            "speed-up is the median of the rounds' own ratios, not the ratio of two medians",
        )
        for temperature in dict.fromkeys(row["temperature"] for row in rows)
    ]


def acceptance_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """What was accepted at each temperature: a row for each category and way, and the mean."""
    names = [*rows[0].get("by_category", ())]
    columns = {"category": "{category}"} if names else {}
    columns |= {"method": "{method}", **(SPEED if names else {}), "tau": "{tau:.2f}"}
    columns |= {"accepted a call": "{accepted_per_call:.2f}", "by depth": "{depths}"}
    if any(row["calls_by_tree"] for row in rows):
        columns["calls with"] = "{trees}"
    tables = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        ways = [row for row in rows if row["temperature"] == temperature]
        shown = [row["by_category"][name] | {"category": name} for name in names for row in ways]
        mean = {"category": "mean of categories", "accepted_of_reached": ()}
        shown += [{**row, **row["mean_of_categories"], **mean} for row in ways if names]
        shown += [{**row, "category": "all"} for row in ways]
        for row in shown:
            rates = ("-" if rate is None else f"{rate:.0%}" for rate in row["accepted_of_reached"])
            row["depths"] = " ".join(rates)
            calls = row["calls_by_tree"] or {}
            row["trees"] = ", ".join(f"{name} {count:,}" for name, count in calls.items())
        title, least = f"Accepted drafts, temperature {temperature:g}", 5 if names else 4
        tables.append(Table(title, shown, columns, least))
    return tables


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Cells of a record of `compare`; "-" is what was not measured."""
    call, share, speed = row["milliseconds_of_call"], row["draft_share"], row["tokens_per_second"]
    rounds = len(row["tokens_per_second_by_round"])
    return {
        "spread": f"{speed['low']:,.0f} to {speed['high']:,.0f}" if rounds >= 3 else "-",
        "call": "-" if call is None else f"{call['median']:.2f}",
        "share": "-" if share is None else f"{share['median']:.0%}",
        "first": f"{row['milliseconds_to_first_token']['median']:.1f}",
        "megabytes": f"{row['memory_bytes'] / 1e6:,.0f}",
        "same": {True: "yes", False: "NO", None: "-"}[row["identical"]],
    }


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
    """Bars of the speed of each method at each temperature, with quartiles; tau beside them."""
    # Some methods are for one temperature only.
    names = [*dict.fromkeys(row["method"] for row in rows)]
    temperatures = [*dict.fromkeys(row["temperature"] for row in rows)]
    right, pitch = max(row["speed_up"]["high"] for row in rows) + 0.04, 0.72 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        own = [row for row in rows if row["temperature"] == temperature]
        places = [names.index(row["method"]) + pitch * number for row in own]
        low, median, high = zip(*(sorted(row["speed_up"].values()) for row in own), strict=True)
        label = f"temperature {temperature:g}"
        axes.barh(places, median, height=pitch - 0.04, color=f"C{number}", label=label)
        axes.hlines(places, low, high, color=_GREY)
        for place, row in zip(places, own, strict=True):
            said = f"{row['speed_up']['median']:.2f}x, tau {row['tau']:.2f}"
            if row["nodes"] == 1:
                said = f"{row['tokens_per_second']['median']:.0f} tokens/s"
            axes.text(right, place, said, va="center", size=9)
    axes.set_yticks([i + (0.72 - pitch) / 2 for i in range(len(names))], names)
    axes.set(title="Tokens per second, no drafts = 1", xticks=(0, 0.5, 1), xlim=(0, right * 1.4))
    axes.set_ylim(len(names) - 0.3, -0.12 - pitch / 2)
    axes.grid(visible=False)
    axes.axvline(1, color=_GREY, linewidth=1, linestyle="--", marker="")
