"""What every benchmark needs: where it ran, interleaved timing, and results on disk."""

import datetime
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine, the versions and the commit that a result belongs to."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
    }


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


def interleaved(
    functions: Mapping[str, Callable[[], Any]], rounds: int, progress: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each call, round by round, so that a slow moment of the machine hits all alike.

    The functions must wait for their results. Warm them up before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - began)
            progress()
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def write_json(name: str, results: Mapping[str, Any], directory: Path | None = None) -> Path:
    """Writes `<name>.json` whole or not at all, into `results/` or another directory."""
    directory = directory or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.rename(path)
    return path


def merged(
    earlier: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """The new rows, after those earlier ones that differ from all of them in one of the keys."""

    def which(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in keys)

    replaced = {which(row) for row in new}
    return [*(row for row in earlier if which(row) not in replaced), *new]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints rows of words and numbers; numbers are right-aligned."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        is_word = all(isinstance(row[i], str) and not row[i][:1].isdigit() for row in rows)
        table.add_column(column, justify="left" if is_word else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
