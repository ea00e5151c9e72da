"""What all benchmarks share: options, machine, clock, memory, tables, results, `main`."""

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import rich.table
from rich.console import Console
from rich.progress import Progress

RESULTS = Path(__file__).parent / "results"  # committed
OUTPUT = Path("benchmark-results")  # ignored by git

# Columns of tables.
SPEED = {"tokens/s": "{tokens_per_second[median]:,.0f}", "speed-up": "{speed_up[median]:.2f}x"}

HELP = {
    "--target": "checkpoint; default: the embedded target",
    "--draft": "checkpoint of its draft",
    "--name": "name of the pair, for the results",
    "--tokens": "new tokens of each text, at most",
    "--rounds": "timed runs",
    "--workloads": "words of their names; default: all",
    "--compared": "tokens to compare in each dtype",
    "--load": "requests over time, relative to what the plain scheduler serves",
}
SMOKE = {"action": "store_true", "help": "tiny sizes, on any device"}

Item = TypeVar("Item")
Output = TypeVar("Output")


def parser_of(
    doc: str, options: Mapping[str, Any], help: Mapping[str, str] = {}
) -> argparse.ArgumentParser:
    """A parser of options that have a default, or arguments of `add_argument`, by their flag."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default in options.items():
        parser.add_argument(flag, **{"help": help.get(flag)} | argument(default))
    return parser


def argument(default: Any) -> dict[str, Any]:
    """Arguments of `add_argument`, by the kind of the default."""
    if isinstance(default, dict):
        return default
    if isinstance(default, tuple):
        return {"nargs": "+", "type": type(default[0]), "default": default}
    return {"type": str if default is None else type(default), "default": default}


def names(known: Iterable[str]) -> dict[str, Any]:
    """An option that chooses some names of several."""
    return {"nargs": "+", "choices": [*known], "default": [*known]}


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses the command line; refuses what would keep the results from being written.

    Args:
        parser: gets the options `--output` and `--commit`.
        arguments: the command line; None: `sys.argv`.

    Returns:
        The options; `output` is an existing directory for the results.
    """
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help=f"directory of the results; default: {OUTPUT}")
    where.add_argument(
        "--commit", action="store_true", help="overwrite the committed ones in benchmarks/results"
    )
    options = parser.parse_args(arguments)
    options.output = RESULTS if options.commit else options.output or OUTPUT
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:
        parser.error(f"cannot write results to {options.output}: {error.strerror}")
    return options


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
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(FileNotFoundError):
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS)
        return ran.stdout.strip() or None
    return None


def device_name(where: Mapping[str, Any]) -> str:
    """The device of `machine()`, for a file name."""
    return re.sub(r"\W+", "-", where["device"].lower()).strip("-")


def _processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor()


_ORDER = random.Random(0)


def timed(
    title: str, ways: Mapping[str, Callable[[Item], Output]], items: Sequence[Item], rounds: int
) -> tuple[dict[str, list[Output]], dict[str, np.ndarray]]:
    """Runs every way on every item, first untimed, then interleaved item by item.

    So a slow moment of the machine affects all ways alike. Their order changes, because the call
    before changes the time of a call by some 3 %.

    Args:
        title: label of the progress bar.
        ways: functions of an item; they block until their output is ready.
        items: prompts, keys, or one None.
        rounds: number of timed calls for each way and item.

    Returns:
        By name, the outputs of the untimed calls, which compile, and seconds `[rounds, items]`.
    """
    outputs: dict[str, list[Output]] = {name: [] for name in ways}
    seconds = {name: np.zeros((rounds, len(items))) for name in ways}
    with Progress(transient=True) as progress:
        task = progress.add_task(title, total=len(ways) * len(items) * (1 + rounds))
        for (name, way), item in itertools.product(ways.items(), items):
            outputs[name].append(way(item))
            progress.advance(task)
        for number, (column, item) in itertools.product(range(rounds), enumerate(items)):
            for name in _ORDER.sample([*ways], len(ways)):
                began = time.perf_counter()
                ways[name](item)
                seconds[name][number, column] = time.perf_counter() - began
                progress.advance(task)
    return outputs, seconds


def timed_calls(
    title: str, calls: Mapping[Any, Callable[[], Any]], rounds: int, unit: float = 1.0
) -> dict[Any, np.ndarray]:
    """Seconds times `unit`, `[rounds]` by name, of calls that return arrays."""
    ways = {
        name: lambda _, call=call: jax.block_until_ready(call()) for name, call in calls.items()
    }
    seconds = timed(title, ways, [None], rounds)[1]
    return {name: unit * taken[:, 0] for name, taken in seconds.items()}


def speeds(
    tokens: Mapping[Any, int], seconds: Mapping[Any, np.ndarray], relative_to: Any
) -> dict[Any, dict[str, Any]]:
    """Tokens a second by name, as rounds and summary, and what they are relative to one of them.

    Args:
        tokens: number of tokens in a round by name.
        seconds: seconds `[rounds, items]` by name, as `timed` gives them.
        relative_to: a name.
    """
    rates = {name: tokens[name] / taken.sum(axis=1) for name, taken in seconds.items()}
    return {
        name: {
            "tokens_per_second": summary(rate),
            "tokens_per_second_by_round": rate.tolist(),
            "speed_up": summary(rate / rates[relative_to]),
        }
        for name, rate in rates.items()
    }


def forget_programs() -> None:
    """Frees compiled programs; jax dies without a message when a process has too many.

    A CPU program has some 400 memory mappings, and Linux allows a process 65,530 in all.
    """
    jax.clear_caches()
    gc.collect()


def num_bytes(arrays: Any) -> int:
    """Bytes of a tree of real or abstract arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes of a program's arguments, temporary memory, and results that alias no argument."""
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    sizes = found.argument_size_in_bytes, found.temp_size_in_bytes, results
    return dict(zip(("arguments", "temporary", "results"), sizes, strict=True))


def summary(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def write_json(name: str, results: Mapping[str, Any], directory: Path) -> Path:
    """Writes `<name>.json` atomically into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.rename(path)
    return path


def conclude(name: str, *, passed: bool = True, **line: Any) -> None:
    """Prints a line of JSON, the last of a benchmark; exit code 1 if its checks failed."""
    print(json.dumps({name: line}))
    if not passed:
        raise SystemExit(1)


class Table(NamedTuple):
    """A table to print: a row for each record, and a format of a record for each column."""

    title: str
    records: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]

    def show(self) -> None:
        """Prints the table; columns of numbers are right-aligned."""
        table = rich.table.Table(title=self.title)
        columns = {
            name: [form.format_map(record) for record in self.records]
            for name, form in self.columns.items()
        }
        for name, cells in columns.items():
            is_word = not any(cell[:1].isdigit() for cell in cells)
            table.add_column(name, justify="left" if is_word else "right")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        console = Console()
        if not console.is_terminal:  # a log is not limited to 80 columns
            console = Console(width=200)
        console.print(table)


class Found(NamedTuple):
    """Findings of an experiment, so far."""

    results: Mapping[str, Any]  # records for the JSON file
    tables: Sequence[Table]  # to print at the end
    wrong: Sequence[Any] = ()  # methods that gave wrong tokens; if any, the experiment fails
    line: Mapping[str, Any] = {}  # summary for the last line, which is JSON


def main(
    run: Callable[[argparse.Namespace], Iterator[Found]],
    options: Mapping[str, Any],
    arguments: Sequence[str] | None = None,
) -> None:
    """Runs an experiment: prints its tables and writes JSON; exit code 1 if it failed.

    Args:
        run: yields what it has found so far: prompts, methods and temperatures go in; records and
            tables come out. Its module has the experiment's name, and begins with its question.
        options: of the experiment, as for `parser_of`.
        arguments: the command line; None: `sys.argv`.
    """
    module = sys.modules[run.__module__]
    name, doc = Path(str(module.__file__)).stem, str(module.__doc__)
    chosen = read_options(parser_of(doc, options, HELP), arguments)
    where = machine()  # before the experiment loads it
    settings = {
        flag: str(value) if isinstance(value, Path) else value
        for flag, value in vars(chosen).items()
        if flag not in ("output", "commit") and value is not None
    }
    parts = (name.replace("_", "-"), settings.get("name"), device_name(where))
    file_name = "-".join(filter(None, parts))
    head = {"question": doc.splitlines()[0], "machine": where} | settings
    for found in run(chosen):  # results so far are saved before the next part
        path = write_json(file_name, head | found.results, chosen.output)
    for table in found.tables:
        table.show()
    line = found.line | {"different": found.wrong, "results": str(path)}
    conclude(name, passed=not found.wrong, **line)
