"""What do a prefix cache and chunked prefill do for requests that arrive over time?

Requests at temperature 0 through a `Scheduler`, with both, with chunked prefill alone, and with
neither, and by `generate` on batches of as many rows in the order of arrival. A batch runs until
its longest request has ended, and counts what its requests asked for. Branches of a chat follow a
text that the cache has read, with the ends of its turns kept or not. First all requests are there
from the start: tokens a second. Then they arrive at random, at a set fraction of the rate at which
the scheduler without either serves them: percentiles of the time from a request's arrival to its
first token, and of its pauses between new tokens. Each run begins with an empty prefix cache.
Rounds are interleaved, and every text is compared with that of the batches.

    python -m benchmarks.serving [--workloads NAME ...] [--requests 32] [--rows 8] [--load 0.7]
        [--rounds 3]
"""

import argparse
import collections
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import stree_jax as st
from benchmarks.common import Found, main, timed
from benchmarks.models import embedded_pair
from benchmarks.workloads import Path, Workload, workloads
from stree_jax.measuring.clock import speeds
from stree_jax.measuring.report import SPEED, Table

OPTIONS = {"--workloads": {"nargs": "+", "default": [""]}, "--requests": 32, "--rows": 8}
OPTIONS |= {"--load": 0.7, "--rounds": 3}

BATCHES, PLAIN = "batches as they come", "scheduler, neither"
SCHEDULERS: dict[str, dict[str, Any]] = {
    PLAIN: {"prefix_cache_bytes": 0, "prefill_tokens": None},
    "scheduler, chunked prefill": {"prefix_cache_bytes": 0},
    "scheduler, prefix cache too": {"prefix_cache_bytes": 2**28},
}
QUANTUM = 8
FIRST = {"first token, median s": "{first[0]:.2f}", "90 %": "{first[1]:.2f}"}
PAUSES = {
    "pause, median ms": "{pauses[0]:.0f}",
    "99 %": "{pauses[1]:.0f}",
    "longest": "{pauses[2]:.0f}",
}


class Served(NamedTuple):
    """One run of a workload."""

    texts: dict[Path, list[int]]  # new tokens
    seconds: float
    times: dict[Path, list[float]]  # when a request arrived, and when it got tokens
    reused: int = 0  # tokens that the prefix cache had


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Each workload, all at once and over time."""
    pair = embedded_pair(options.requests)
    tokenizer = st.load_tokenizer(st.demo_path("target"))
    records: list[dict[str, Any]] = []
    tables: list[Table] = []
    for workload in workloads(pair.prompts, lambda text: tokenizer.encode(text).ids):
        if not any(map(workload.name.count, options.workloads)):
            continue
        found = measured(pair.target, workload, options)
        records += found
        columns = {"way": "{way}"} | SPEED | {"tokens reused": "{reused}", "same": "{same_tokens}"}
        tables.append(Table(f"{workload.name}, all at once", found, columns | FIRST))
        streams = [row for row in found if row["pauses"]]
        title = f"{workload.name}, {options.load:.0%} of the rate of the scheduler with neither"
        tables.append(Table(title, found, {"way": "{way}"} | FIRST))
        tables.append(Table(title, streams, {"way": "{way}"} | PAUSES))
        yield Found(
            pair.settings() | {"quantum": QUANTUM, "ways": records},
            tables,
            wrong=[
                (row["workload"], row["way"])
                for row in records
                if row["same_tokens"] < row["requests"]
            ],
            line={"speed_up": {row["workload"]: row["speed_up"]["median"] for row in records}},
        )


def measured(
    model: st.HybridLM, workload: Workload, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A record for each way of serving a workload."""
    ways: dict[str, Callable[[Sequence[float]], Served]] = {
        BATCHES: functools.partial(batched, model, workload, rows=options.rows)
    }
    for name, settings in SCHEDULERS.items():
        ways[name] = functools.partial(scheduled, model, workload, rows=options.rows, **settings)
    at_once = [0.0] * len(workload.first)
    saturated = served(f"{workload.name}, at once", ways, at_once, options.rounds)
    seconds = {name: np.array([[one.seconds] for one in runs]) for name, runs in saturated.items()}
    gap = np.median(seconds[PLAIN]) / len(workload.first) / options.load
    arrivals = np.cumsum(np.random.default_rng(1).exponential(gap, len(workload.first))).tolist()
    over_time = served(f"{workload.name}, over time", ways, arrivals, options.rounds)
    waited = {
        name: [np.diff(times) for one in runs for times in one.times.values()]
        for name, runs in over_time.items()
    }
    want = saturated[BATCHES][0].texts
    tokens = sum(map(len, want.values()))
    speed = speeds(dict.fromkeys(ways, tokens), seconds, PLAIN)
    return [
        {
            "workload": workload.name,
            "way": name,
            "requests": len(want),
            "new_tokens": tokens,
            "reused": saturated[name][0].reused,
            "same_tokens": min(
                sum(one.texts[path] == text for path, text in want.items())
                for one in (*saturated[name], *over_time[name])
            ),
            "seconds_between_arrivals": float(gap),
            "first": _percentiles([waits[:1] for waits in waited[name]], (50, 90, 99)),
            "pauses": _percentiles([1e3 * waits[1:] for waits in waited[name]], (50, 99, 100)),
        }
        | speed[name]
        for name in ways
    ]


def served(
    title: str,
    ways: Mapping[str, Callable[[Sequence[float]], Served]],
    arrivals: Sequence[float],
    rounds: int,
) -> dict[str, list[Served]]:
    """The timed runs of each way."""
    runs: dict[str, list[Served]] = {name: [] for name in ways}
    kept = {
        name: lambda due, name=name, way=way: runs[name].append(way(due))
        for name, way in ways.items()
    }
    timed(title, kept, [arrivals], rounds)
    return {name: some[1:] for name, some in runs.items()}


def _percentiles(waits: Sequence[np.ndarray], percents: Sequence[int]) -> list[float]:
    values = np.concatenate(waits)
    return np.percentile(values, percents).tolist() if len(values) else []


class _Clock:
    """The requests of a run: those that have arrived, and what became of them.

    The clock starts when it is made.
    """

    def __init__(self, workload: Workload, arrivals: Sequence[float]):
        self._following, self._began = workload.following, time.perf_counter()
        requests = enumerate(zip(arrivals, workload.first, strict=True))
        self._waiting = collections.deque((due, (i,), request) for i, (due, request) in requests)
        self._requests: dict[Path, st.Request] = {}
        self._texts: dict[Path, list[int]] = {}
        self._times: dict[Path, list[float]] = {}

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def arrived(self, most: int | None = None) -> dict[Path, st.Request]:
        """The requests that are due, once each."""
        new: dict[Path, st.Request] = {}
        while self._waiting and self._waiting[0][0] <= self.now and len(new) != most:
            due, path, request = self._waiting.popleft()
            self._times[path], self._texts[path] = [due], []
            self._requests[path] = new[path] = request
        return new

    def sleep(self) -> bool:
        """Until the next request; False if there is none."""
        if self._waiting:
            time.sleep(max(self._waiting[0][0] - self.now, 0))
        return bool(self._waiting)

    def got(self, path: Path, tokens: Sequence[int], *, ended: bool) -> None:
        """Takes new tokens of a request; when it has ended, others may follow at once."""
        now, text = self.now, self._texts[path]
        self._times[path] += [now] if tokens else []
        text += tokens
        if ended:
            whole = [*self._requests[path].prompt, *text]
            for after, request in self._following(path, whole).items():
                self._waiting.appendleft((now, after, request))

    def served(self, reused: int = 0) -> Served:
        """The results."""
        return Served(self._texts, self.now, self._times, reused)


def scheduled(
    model: st.HybridLM, workload: Workload, arrivals: Sequence[float], **settings: Any
) -> Served:
    """A run through a scheduler."""
    scheduler = st.Scheduler(model, max_length=workload.max_length, quantum=QUANTUM, **settings)
    if workload.known and settings["prefix_cache_bytes"]:
        scheduler.read(workload.known[0], keep=workload.known[1])
    clock, paths = _Clock(workload, arrivals), {}
    while True:
        for path, request in clock.arrived().items():
            paths[scheduler.submit(request)] = path
        event = next(scheduler.events(), None)
        if event is not None:
            ended = event.finish_reason is not None
            clock.got(paths[event.request_id], event.tokens, ended=ended)
            if ended:
                scheduler.pop(event.request_id)
        elif not clock.sleep():
            return clock.served(scheduler.prefix_cache_stats.tokens_reused)


def batched(
    model: st.HybridLM, workload: Workload, arrivals: Sequence[float], *, rows: int
) -> Served:
    """A run by `generate`, on batches of what has arrived; no tokens before a batch has ended."""
    clock = _Clock(workload, arrivals)
    while True:
        if batch := clock.arrived(rows):
            some = [*batch.values()]
            filled = [*some, *some[:1] * (rows - len(some))]  # one program for all batches
            out = st.generate(
                model,
                [request.prompt for request in filled],
                max_new_tokens=max(request.max_new_tokens for request in some),
                max_length=workload.max_length,
                eos_token=(),
            )
            for path, row in zip(batch, out.tokens, strict=False):
                clock.got(path, row[: batch[path].max_new_tokens].tolist(), ended=True)
        elif not clock.sleep():
            return clock.served()


if __name__ == "__main__":
    main(run, OPTIONS)
