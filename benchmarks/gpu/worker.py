"""The process of a section: does its tasks, and reports each to `benchmarks.gpu.runner`.

It reads its job, a line of JSON, from standard input, and ends as soon as that is closed: a runner
that is killed leaves no process on the GPU. Messages are lines of JSON on standard output:

    {"machine": {...}}                  first
    {"obstacle": "..."}                 there is no GPU; nothing else follows
    {"open": [...], "seconds": 60}      these tasks are being prepared or measured
    {"row": {"task": ..., ...}}         one of them is done
    {"left_out": [...]}                 for lack of time

The exit code is 0 if it came to the end.
"""

import concurrent.futures
import importlib
import importlib.metadata
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import machine
from benchmarks.gpu.tasks import Row, Section, Task
from pallas_kernels import dispatch

THREADS = 8  # XLA compiles without holding Python's lock
PREPARING = 150.0  # seconds
BROKEN = 70  # exit code: the device no longer answers, as after an illegal address
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy"),
    *("torch", "transformers", "mamba-ssm", "causal-conv1d"),
)

Send = Callable[..., None]


def do(
    section: Section, job: Mapping[str, Any], send: Send, works: Callable[[], bool] = lambda: True
) -> int:
    """Does the tasks of a section that have no row yet; returns the exit code.

    Args:
        section: its tasks, and how to run them.
        job: `options`, earlier `rows`, `seconds` in which tasks may begin, and optionally
            `together`, the number of tasks that are prepared at a time.
        send: sends a message to the runner.
        works: whether the device still answers; called after a failure.
    """
    end = time.monotonic() + job["seconds"]
    done = {row["task"] for row in job["rows"]}
    tasks = (t for t in section.tasks(job["options"], job["rows"]) if t.name not in done)
    together = job.get("together") or section.together
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        while chunk := list(itertools.islice(tasks, together)):
            if time.monotonic() >= end:
                send(left_out=[task.name for task in itertools.chain(chunk, tasks)])
                break
            names = [task.name for task in chunk]
            send(open=names, seconds=PREPARING)
            prepared = [pool.submit(_prepared, task) for task in chunk]
            if section.timed:
                concurrent.futures.wait(prepared)
            for i, (task, future) in enumerate(zip(chunk, prepared, strict=True)):
                found = future.result()
                if isinstance(found, _Failed) and len(chunk) > 1 and not works():
                    return BROKEN  # by one of those that are open: the runner tries each alone
                if section.timed:
                    send(open=[task.name], seconds=section.seconds)
                row = _measured(task, found)
                send(row={"task": task.name} | row)
                if "failed" in row and not works():
                    return BROKEN
                if not section.timed:
                    send(open=names[i + 1 :], seconds=PREPARING)
            jax.clear_caches()  # programs hold on to memory
    return 0


class _Failed(str):
    """Why a task has no result."""


def _failure(error: Exception) -> _Failed:
    return _Failed(f"{type(error).__name__}: {error!s:.500}")


def _prepared(task: Task) -> Any:
    try:
        return task.prepare()
    except Exception as error:
        return _failure(error)


def _measured(task: Task, prepared: Any) -> Row:
    if isinstance(prepared, _Failed):
        return {"failed": prepared}
    try:
        return task.measure(prepared)
    except Exception as error:
        return {"failed": _failure(error)}


def device_works() -> bool:
    """Whether the device still computes."""
    try:
        return bool(jax.jit(jnp.sum)(jnp.ones(8)) == 8)
    except Exception:
        return False


def described() -> dict[str, Any]:
    """The machine, versions, ptxas, and the choice of kernels."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    places = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    return machine() | {
        "versions": versions,
        "ptxas": shutil.which("ptxas", path=places),  # without one XLA compiles no kernel
        "kernels_chosen": dispatch.explain(),
    }


def main() -> int:
    """Does the job on standard input."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is no message

    def send(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    obstacle = None if job["options"]["smoke"] else dispatch.device_obstacle()
    if obstacle:
        send(obstacle=obstacle)
        return 0
    send(machine=described())
    section = importlib.import_module(job["module"]).SECTIONS[job["section"]]
    return do(section, job, send, device_works)


def _end_with_the_runner() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a broken device could make an orderly end hang
