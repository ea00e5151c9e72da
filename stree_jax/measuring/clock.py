"""The clock: calls timed in turns, round by round; what a machine and a program are."""

import contextlib
import datetime
import itertools
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import jax
import numpy as np

Item = TypeVar("Item")
Output = TypeVar("Output")
Progress = Callable[[str, int, int], None]  # the task, its finished parts, the number of parts

_ORDER = random.Random(0)


class Quartiles(TypedDict):
    """Median and quartiles of what was measured in several rounds."""

    median: float
    low: float
    high: float


def silent(phase: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def timed_rounds(
    ways: Mapping[Any, Callable[[Item], Output]],
    items: Sequence[Item],
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[tuple[dict[Any, list[Output]], dict[Any, np.ndarray]]]:
    """Runs every way on every item: untimed, then in changing order.

    After each round it yields, by name, what the untimed calls gave, and seconds `[rounds, items]`.
    """
    outputs: dict[Any, list[Output]] = {name: [] for name in ways}
    seconds = {name: np.zeros((rounds, len(items))) for name in ways}
    for (name, way), item in itertools.product(ways.items(), items):
        outputs[name].append(way(item))
        advance()
    for number in range(rounds):
        for column, item in enumerate(items):
            for name in _ORDER.sample([*ways], len(ways)):
                began = time.perf_counter()
                ways[name](item)
                seconds[name][number, column] = time.perf_counter() - began
                advance()
        yield outputs, {name: taken[: number + 1] for name, taken in seconds.items()}


def summary(values: Sequence[float] | np.ndarray) -> Quartiles:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "low": low, "high": high}


def speeds(
    tokens: Mapping[Any, int], seconds: Mapping[Any, np.ndarray], relative_to: Any
) -> dict[Any, dict[str, Any]]:
    """Tokens a second by name, and relative to one of them; seconds are `[rounds, items]`."""
    rates = {name: tokens[name] / taken.sum(axis=1) for name, taken in seconds.items()}
    return {
        name: {
            "tokens_per_second": summary(rate),
            "tokens_per_second_by_round": rate.tolist(),
            "speed_up": summary(rate / rates[relative_to]),
        }
        for name, rate in rates.items()
    }


def num_bytes(arrays: Any) -> int:
    """Bytes of a tree of real or abstract arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes of a program's arguments, temporary memory, and results that alias no argument."""
    sizes = compiled.memory_analysis()
    return {
        "arguments": sizes.argument_size_in_bytes,
        "temporary": sizes.temp_size_in_bytes,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    }


def machine() -> dict[str, Any]:
    """The machine and the versions, as they are recorded with what was measured."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor()
