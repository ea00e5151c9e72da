"""Parts that all benchmarks share: options, machine, clock, memory, tables, plots, results."""

import argparse
import datetime
import functools
import gc
import itertools
import json
import os
import platform
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import rich.table
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

RESULTS = Path(__file__).parent / "results"  # committed
OUTPUT = Path("benchmark-results")  # ignored by git

# Columns of tables.
SPEED = {"tokens/s": "{tokens_per_second[median]:,.0f}", "speed-up": "{speed_up[median]:.2f}x"}

Item = TypeVar("Item")
Output = TypeVar("Output")


def read_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    *,
    plots: bool = False,
) -> argparse.Namespace:
    """Parses the command line; refuses what would keep the results from being written.

    Args:
        parser: gets the options `--output` and `--commit`.
        arguments: the command line; None: `sys.argv`.
        plots: whether the benchmark needs matplotlib.

    Returns:
        The options; `output` is an existing directory for the results.
    """
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help=f"directory of the results; default: {OUTPUT}")
    where.add_argument(
        "--commit", action="store_true", help="overwrite the committed ones in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    if plots:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            parser.error(f"the plot needs matplotlib ({error}): pip install '.[bench]'")
    options.output = RESULTS if options.commit else options.output or OUTPUT
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:
        parser.error(f"cannot write results to {options.output}: {error.strerror}")
    return options


def progress_bar() -> Progress:
    """A bar with the time left, shown inside a `with` block."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        transient=True,
    )


def machine() -> dict[str, Any]:
    """The machine, the versions and the commit, recorded with each result."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """None outside a checkout, or without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except FileNotFoundError:
        return None
    return described.stdout.strip() or None


def device_name(where: Mapping[str, Any]) -> str:
    """The device of `machine()`, for a file name."""
    return re.sub(r"\W+", "-", where["device"].lower()).strip("-")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor()


_ORDER = random.Random(0)


def interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, progress: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each call, in rounds, so that a slow moment of the machine affects all alike.

    Each round has another order, because the call before changes the time of a call by some 3 %.
    The functions must be compiled already, and must block until their results are ready.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in _ORDER.sample([*functions], len(functions)):
            function = functions[name]
            began = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - began)
            progress()
    return seconds


def timed(
    title: str, ways: Mapping[str, Callable[[Item], Output]], items: Sequence[Item], rounds: int
) -> tuple[dict[str, list[Output]], dict[str, np.ndarray]]:
    """Runs every way on every item, first untimed, then interleaved item by item.

    Args:
        title: label of the progress bar.
        ways: functions of an item; they block until their output is ready.
        items: prompts, keys, or one None.
        rounds: number of timed calls for each way and item.

    Returns:
        By name, the outputs of the untimed calls, which compile, and seconds `[rounds, items]`.
    """
    with progress_bar() as progress:
        task = progress.add_task(title, total=len(ways) * len(items) * (1 + rounds))

        def advance() -> None:
            progress.advance(task)

        outputs: dict[str, list[Output]] = {name: [] for name in ways}
        for name, way in ways.items():
            for item in items:
                outputs[name].append(way(item))
                advance()
        seconds = {name: np.zeros((rounds, len(items))) for name in ways}
        for number, (column, item) in itertools.product(range(rounds), enumerate(items)):
            calls = {name: functools.partial(way, item) for name, way in ways.items()}
            for name, (taken,) in interleaved(calls, 1, advance).items():
                seconds[name][number, column] = taken
    return outputs, seconds


def forget_programs() -> None:
    """Frees compiled programs; jax dies without a message when a process has too many.

    A CPU program has some 400 memory mappings, and Linux allows a process 65,530 in all.
    """
    jax.clear_caches()
    gc.collect()


def num_bytes(arrays: Any) -> int:
    """Bytes of a tree of real or abstract arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


class Memory(NamedTuple):
    """Device memory of a compiled program, in bytes."""

    arguments: int
    temporary: int
    results: int  # without those that share the memory of an argument

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """The compiler's memory analysis."""
        found = compiled.memory_analysis()
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        return cls(found.argument_size_in_bytes, found.temp_size_in_bytes, results)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def write_json(name: str, results: Mapping[str, Any], directory: Path | None = None) -> Path:
    """Writes `<name>.json` atomically, into `results/` or another directory."""
    directory = directory or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.rename(path)
    return path


def save(name: str, doc: str, results: Mapping[str, Any], directory: Path) -> Path:
    """Writes `<name>-<device>.json` with the machine and the question, the first line of `doc`.

    Args:
        name: the benchmark's name.
        doc: docstring of the benchmark's module.
        results: measured values, and the `machine` if it was recorded before the measurement.
        directory: the `output` of `read_options`.
    """
    head = {"question": doc.splitlines()[0], "machine": results.get("machine") or machine()}
    return write_json(f"{name}-{device_name(head['machine'])}", head | results, directory)


def conclude(name: str, *, passed: bool = True, **line: Any) -> None:
    """Prints a line of JSON, the last of a benchmark; exit code 1 if its checks failed."""
    print(json.dumps({name: line}))
    if not passed:
        raise SystemExit(1)


class Panel(NamedTuple):
    """One of the plots of a figure: records, and formats of a record, as in `Table`."""

    x_label: str  # without one, x are categories and the plot has bars
    y_label: str
    records: Sequence[Mapping[str, Any]]  # of all lines
    x: str  # format of x
    lines: Mapping[str, str]  # y by the label of a line, both formats; dashed if at "T = 1"

    def points(self) -> dict[str, list[tuple[str, float]]]:
        """The points of each line, x as text."""
        found: dict[str, list[tuple[str, float]]] = {}
        for (label, y), record in itertools.product(self.lines.items(), self.records):
            point = self.x.format_map(record), float(y.format_map(record))
            found.setdefault(label.format_map(record), []).append(point)
        return found


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Draws panels side by side, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (5.5 * len(panels), 4.5)
    figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(row[0], panels, strict=True):
        lines = panel.points()
        names = list(dict.fromkeys(x for line in lines.values() for x, _ in line))
        for number, (label, line) in enumerate(lines.items()):
            xs, ys = zip(*line, strict=True)
            if panel.x_label:
                style = "--" if label.endswith("T = 1") else "-"
                axes.plot([*map(float, xs)], ys, style, marker="o", label=label)
            else:
                offset = 0.8 * ((number + 0.5) / len(lines) - 0.5)
                at = [names.index(x) + offset for x in xs]
                axes.bar(at, ys, width=0.76 / len(lines), label=label)
        if not panel.x_label:
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, None))
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def merged(
    earlier: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """The earlier rows whose keys no new row has, and then the new rows."""

    def which(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in keys)

    replaced = {which(row) for row in new}
    return [*(row for row in earlier if which(row) not in replaced), *new]


class Table(NamedTuple):
    """A table to print: a row for each record, and a format of a record for each column."""

    title: str
    records: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]

    def show(self) -> None:
        """Prints the table."""
        cells = [
            [form.format_map(record) for form in self.columns.values()] for record in self.records
        ]
        print_table(self.title, [*self.columns], cells)


class Found(NamedTuple):
    """Findings of an experiment, so far."""

    results: Mapping[str, Any]  # records for the JSON file
    tables: Sequence[Table]  # to print at the end
    panels: Sequence[Panel]  # plots of the figure
    wrong: Sequence[Any] = ()  # methods that gave wrong tokens; if any, the experiment fails
    notes: Sequence[str] = ()  # lines to print below the tables
    line: Mapping[str, Any] = {}  # summary for the last line, which is JSON


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; columns of numbers are right-aligned."""
    table = rich.table.Table(title=title)
    for i, column in enumerate(columns):
        is_word = all(isinstance(row[i], str) and not row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="left" if is_word else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # a log is not limited to 80 columns
        console = Console(width=200)
    console.print(table)
