"""Shared by all benchmarks: options, a bar around the library's clock, results, `main`."""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stree_jax.measuring import clock
from stree_jax.measuring.clock import Item, Output, timed_rounds
from stree_jax.measuring.report import Table, progress_bar, write_json

RESULTS = Path(__file__).parent / "results"  # committed
OUTPUT = Path("benchmark-results")  # ignored by git
# Lists by prompt, round and piece; the committed results have their medians and sums only.
RAW = {"seconds_by_prompt", "tau_by_prompt", "tokens_per_second_by_round", "work"}

HELP = {
    "--target": "checkpoint; default: the embedded target",
    "--draft": "checkpoint of its draft",
    "--name": "name of the pair, for the results",
    "--tokens": "new tokens of each text, at most",
    "--rounds": "timed runs",
    "--workloads": "words of their names; default: all",
    "--load": "requests over time, relative to what the plain scheduler serves",
}
SMOKE = {"action": "store_true", "help": "tiny sizes, on any device"}


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
    """Parses the command line, with `--output` and `--commit`; refuses what it cannot write to."""
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
    return clock.machine() | {"commit": _commit()}


def _commit() -> str | None:
    """None outside a checkout, or without git."""
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(FileNotFoundError):
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS)
        return ran.stdout.strip() or None
    return None


def timed(
    title: str, ways: Mapping[str, Callable[[Item], Output]], items: Sequence[Item], rounds: int
) -> tuple[dict[str, list[Output]], dict[str, np.ndarray]]:
    """All rounds of `timed_rounds`, with a bar."""
    ticks, total = itertools.count(1), len(ways) * len(items) * (1 + rounds)
    with progress_bar() as show:
        *_, last = timed_rounds(ways, items, rounds, lambda: show(title, next(ticks), total))
    return last


def timed_calls(
    title: str, calls: Mapping[Any, Callable[[], Any]], rounds: int, unit: float = 1.0
) -> dict[Any, np.ndarray]:
    """Seconds times `unit`, `[rounds]` by name, of calls that return arrays."""
    ways = {
        name: lambda _, call=call: jax.block_until_ready(call()) for name, call in calls.items()
    }
    seconds = timed(title, ways, [None], rounds)[1]
    return {name: unit * taken[:, 0] for name, taken in seconds.items()}


class Worker:
    """Things in a process of their own, which ends with this object.

    What crashes there ends nothing here: it is a RuntimeError.
    """

    def __init__(self, make: Callable[..., Iterable[Any]], *arguments: Any):
        """Waits until `make` has made them there, a function that a module has."""
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that a crash is the end of the pipe
        self._received()

    def run(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """The function of the things and of these arguments."""
        self._pipe.send((function, arguments, settings))
        return self._received()

    def _received(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process has ended with {code}") from None


def _serve(pipe: Any, make: Callable[..., Iterable[Any]], arguments: Sequence[Any]) -> None:
    things = make(*arguments)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            function, more, settings = pipe.recv()
            pipe.send(function(*things, *more, **settings))


def conclude(name: str, *, passed: bool = True, **line: Any) -> None:
    """Prints a line of JSON, the last of a benchmark; exit code 1 if its checks failed."""
    print(json.dumps({name: line}))
    if not passed:
        raise SystemExit(1)


def without_raw(value: Any) -> Any:
    """Results without the lists of `RAW`."""
    if isinstance(value, list):
        return [without_raw(each) for each in value]
    if isinstance(value, dict):
        return {key: without_raw(each) for key, each in value.items() if key not in RAW}
    return value


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

    `run` yields what it has found so far; its module has the experiment's name and begins with its
    question. `options` are those of `parser_of`.
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
    name = settings.get("comparison", name)
    device = re.sub(r"\W+", "-", where["device"].lower()).strip("-")
    parts = (name.replace("_", "-"), settings.get("name"), device)
    file_name = "-".join(filter(None, parts))
    head = {"question": doc.splitlines()[0], "machine": where} | settings
    for found in run(chosen):  # results so far are saved before the next part
        content = head | found.results
        content = without_raw(content) if chosen.commit else content
        path = write_json(chosen.output / f"{file_name}.json", content)
    for table in found.tables:
        print(table)
    line = found.line | {"different": found.wrong, "results": str(path)}
    conclude(name, passed=not found.wrong, **line)
