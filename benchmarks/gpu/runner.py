"""Runs each section in a process of its own, and keeps its rows whatever happens to it.

The results are one JSON file, replaced as a whole for every row. A section whose process crashes or
hangs, or whose device no longer answers, is started again without the task that was open. At its
time limit it is killed.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import OUTPUT, device_name, write_json
from benchmarks.gpu.worker import BROKEN

STARTING = 90.0  # seconds in which a process finds its device, makes its models, or ends
LATEST = 1.25  # times the share of a section: when it is killed
NOT_BEGUN, DONE = "not begun", "done"
AND_MORE = "and what comes after it"
_CHECKOUT = Path(__file__).parents[2]


class NoGpu(Exception):
    """The device is no GPU; the message names it."""


class Results:
    """A file of results that is complete at every moment.

    Args:
        path: file; rows that it has already are kept.
        head: first entries of the results; an existing file must agree on them.

    Raises:
        ValueError: the file is of another kind of run.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]):
        self.path = path
        self.data: dict[str, Any] = dict(head) | {"machine": None, "sections": {}}
        if path.exists():
            self.data = json.loads(path.read_text())
            self._require(self.data, head, head)

    @classmethod
    def of(cls, options: argparse.Namespace, name: str, head: Mapping[str, Any]) -> "Results":
        """The file of a command; only a folder of its own resumes an earlier run."""
        directory = OUTPUT if options.commit else options.output
        path = directory / f"{name}.json"
        if directory == OUTPUT:
            path.unlink(missing_ok=True)
        return cls(path, head)

    def _require(self, earlier: Mapping[str, Any], now: Mapping[str, Any], keys: Any) -> None:
        for key in keys:
            if earlier.get(key) != now[key]:
                raise ValueError(
                    f"{self.path} has {key} = {earlier.get(key)!r:.80}, this run {now[key]!r:.80};"
                    " choose another --output, or remove it"
                )

    def section(self, name: str) -> dict[str, Any]:
        """The entry of a section."""
        return self.data["sections"].setdefault(name, {"state": NOT_BEGUN, "rows": []})

    def describe(self, machine: dict[str, Any]) -> None:
        """Records the machine.

        Raises:
            ValueError: the results are of another device or version of jax.
        """
        self._require(self.data["machine"] or machine, machine, ("device", "jax"))
        self.data["machine"] = machine

    def save(self) -> Path:
        """Replaces the file."""
        return write_json(self.path.stem, self.data, self.path.parent)

    def commit(self, directory: Path) -> Path:
        """Writes them into another directory as well, under the name of the device."""
        name = f"{self.path.stem}-{device_name(self.data['machine'])}"
        return write_json(name, self.data, directory)


def run_section(
    results: Results,
    name: str,
    seconds: float,
    limit: float,
    options: Mapping[str, Any],
    *,
    module: str = "benchmarks.gpu.sections",
    changed: Callable[[], Any] = lambda: None,
) -> None:
    """Runs the tasks of a section that have no row yet.

    Args:
        results: file that rows are added to.
        name: key of `SECTIONS`.
        seconds: time in which tasks may begin.
        limit: seconds after which the process is killed.
        options: passed to the section's tasks.
        module: module that has `SECTIONS`.
        changed: called before results are saved.

    Raises:
        NoGpu: the device is no GPU.
    """
    note = results.section(name)
    began, before = time.monotonic(), note.get("seconds", 0.0)
    note |= {"state": "running", "left_out": []}
    note.pop("failed", None)
    job = {"section": name, "module": module, "options": dict(options)}

    def save() -> None:
        note["seconds"] = round(before + time.monotonic() - began, 1)
        changed()
        results.save()

    while True:
        job |= {"rows": note["rows"], "seconds": began + seconds - time.monotonic()}
        worker = _Worker(job, began + limit)
        with contextlib.closing(worker.messages()) as messages:
            for message in messages:
                match message:
                    case {"obstacle": text}:
                        raise NoGpu(text)
                    case {"machine": machine}:
                        results.describe(machine)
                    case {"row": row}:
                        note["rows"].append(row)
                    case {"left_out": names}:
                        note["left_out"] = names
                save()
        ended = worker.ended
        if ended is None:
            note["state"] = "left some out" if note["left_out"] else DONE
        elif time.monotonic() >= began + limit:
            note |= {"state": "killed at its limit", "left_out": [*worker.open, AND_MORE]}
        elif len(worker.open) == 1:
            note["rows"].append({"task": worker.open[0], "failed": ended})
            save()
            continue
        elif worker.open:  # one of them: which?
            job["together"] = 1
            continue
        elif worker.progress:  # the device broke after its last row
            continue
        else:
            note |= {"state": "failed", "failed": ended}
        save()
        return


class _Worker:
    """The process of a section.

    Attributes:
        open: tasks in progress at its end.
        progress: whether it sent a row.
        ended: how it failed, or None if it came to the end.
    """

    def __init__(self, job: Mapping[str, Any], end: float):
        self.open: list[str] = []
        self.progress = False
        self.ended: str | None = None
        self._end = end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_CHECKOUT,
            env=_environment(smoke=job["options"]["smoke"]),
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._talk, args=(json.dumps(job) + "\n",), daemon=True
        )
        self._thread.start()

    def _talk(self, job: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; the next lines notice
            self._process.stdin.write(job)
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.endswith("\n"):
                self._lines.put(line)
        self._lines.put("")

    def messages(self) -> Any:
        """Its messages, until it ends or is killed."""
        latest = time.monotonic() + STARTING
        try:
            while True:
                wait = min(latest, self._end) - time.monotonic()
                try:
                    line = self._lines.get(timeout=max(wait, 0.0))
                except queue.Empty:
                    self.ended = "stopped answering"
                    return
                if not line:
                    break
                message = json.loads(line)
                latest = time.monotonic() + message.get("seconds", STARTING)
                self.open = message.get("open", self.open)
                if "row" in message:
                    self.open, self.progress = [], True
                yield message
            code = self._process.wait()
            if code:
                broken = "the device no longer answers"
                self.ended = broken if code == BROKEN else f"the process ended with {code}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._thread.join()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _environment(*, smoke: bool) -> dict[str, str]:
    """Variables for the process of a section; those that the user has set stay."""
    values = {"PYTHONUNBUFFERED": "1"}
    if smoke:  # most of its time is compiling
        values["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    else:
        # JAX would take three quarters of the memory, and leave too little for torch.
        values["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        # Programs, with their tuned products, are shared by the processes.
        values["JAX_COMPILATION_CACHE_DIR"] = str(_CHECKOUT / "build" / "xla")
        values["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return values | os.environ
