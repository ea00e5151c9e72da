"""What the benchmarks share: options, the machine, timing, memory, tables, plots, results."""

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

RESULTS = Path(__file__).parent / "results"  # committed
OUTPUT = Path("benchmark-results")  # of everybody's own runs; git ignores it


def read_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    *,
    plots: bool = False,
) -> argparse.Namespace:
    """Parses the command line, and checks before anything is measured what its end will need.

    Args:
        parser: gets the options `--output` and `--commit`.
        arguments: None: those of the process.
        plots: the benchmark plots its results.

    Returns:
        The options; `output` is the directory to write to, which exists.
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
    """A bar with the time left, for the length of a `with`."""
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
    """The machine, the versions and the commit of a result."""
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
    """The device of `machine()` as part of a file name."""
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

    Each round has another order: what runs before a call changes its time by some 3 %. The
    functions must be warm, and must block until their results are ready.
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


def forget_programs() -> None:
    """Frees compiled programs; jax ends without a word when a process has too many.

    A CPU program has some 400 memory mappings, and Linux allows a process 65,530 in all.
    """
    jax.clear_caches()
    gc.collect()


class Memory(NamedTuple):
    """Device memory of a compiled program, in bytes."""

    arguments: int
    temporary: int
    results: int  # without those that share the memory of an argument

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """By the compiler's own account."""
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
    """Writes `<name>-<device>.json`, with the machine and the question that `doc` begins with.

    Args:
        name: of the benchmark.
        doc: the docstring of its module.
        results: what it measured; its own `machine` comes first if it has one.
        directory: the `output` of `read_options`.
    """
    head = {"question": doc.splitlines()[0], "machine": results.get("machine") or machine()}
    return write_json(f"{name}-{device_name(head['machine'])}", head | results, directory)


def conclude(name: str, *, passed: bool = True, **line: Any) -> None:
    """Prints the last line of a benchmark, which is JSON; exit code 1 if its checks failed."""
    print(json.dumps({name: line}))
    if not passed:
        raise SystemExit(1)


@contextlib.contextmanager
def plotted(path: Path, columns: int, width: float, height: float) -> Iterator[Any]:
    """Axes of a figure (an array of them if there are `columns`), which is saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    yield axes
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


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; columns of numbers are right-aligned."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        is_word = all(isinstance(row[i], str) and not row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="left" if is_word else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # a log, which need not fit 80 columns
        console = Console(width=200)
    console.print(table)
