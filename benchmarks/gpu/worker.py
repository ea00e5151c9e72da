"""The process of a section: does its tasks, and reports each to `benchmarks.gpu.runner`.

Messages are JSON:

    {"machine": {...}}                  first
    {"obstacle": "..."}                 there is no GPU; nothing else follows
    {"open": [...], "seconds": 60}      these tasks are being prepared or measured
    {"row": {"task": ..., ...}}         one of them is done
    {"left_out": [...]}                 for lack of time

The exit code is 0 if it came to the end.
"""

import concurrent.futures
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import machine
from benchmarks.gpu.tasks import Row, Section
from pallas_kernels import dispatch

THREADS = 8  # XLA compiles without holding Python's lock
PREPARING = 150.0  # seconds
BROKEN = 70  # exit code: the device no longer answers, as after an illegal address
PROGRAMS = Path(__file__).parents[2] / "build" / "xla"
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy"),
    *("torch", "transformers", "mamba-ssm", "causal-conv1d"),
)


def do(
    section: Section,
    job: Mapping[str, Any],
    send: Callable[..., None],
    works: Callable[[], bool] = lambda: True,
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
    together = job.get("together", section.together)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        while chunk := list(itertools.islice(tasks, together)):
            if time.monotonic() >= end:
                send(left_out=[task.name for task in itertools.chain(chunk, tasks)])
                break
            send(open=[task.name for task in chunk], seconds=PREPARING)
            prepared = [pool.submit(task.prepare) for task in chunk]
            concurrent.futures.wait(prepared)
            failed = any(future.exception() for future in prepared)
            if failed and together > 1 and not works():
                return BROKEN  # by one of those that are open: the runner tries each alone
            for task, future in zip(chunk, prepared, strict=True):
                send(open=[task.name], seconds=section.seconds)
                row: Row = {"task": task.name}
                try:
                    row |= task.measure(future.result())
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error!s:.500}"
                send(row=row)
                if "failed" in row and not works():
                    return BROKEN
            jax.clear_caches()  # programs hold on to memory
    return 0


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
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    places = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    return machine() | {
        "versions": versions,
        "ptxas": shutil.which("ptxas", path=places),  # without one XLA compiles no kernel
        "kernels_chosen": dispatch.explain(),
    }


def main(connection: Any, job: Mapping[str, Any]) -> None:
    """Does a job, and sends messages through a connection."""
    os.dup2(2, 1)  # the last line of the runner's output is its own
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    if job["options"]["smoke"]:  # most of its time is compiling
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    else:
        # JAX would take three quarters of the memory, and leave too little for torch.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        # Programs, with their tuned products, are shared by the processes.
        jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def send(**message: Any) -> None:
        connection.send(json.dumps(message))

    obstacle, code = None if job["options"]["smoke"] else dispatch.device_obstacle(), 0
    if obstacle:
        send(obstacle=obstacle)
    else:
        send(machine=described())
        section = importlib.import_module(job["module"]).SECTIONS[job["section"]]
        code = do(section, job, send, device_works)
    sys.stderr.flush()
    os._exit(code)  # a broken device could make an orderly end hang


def _end_with_the_runner() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
