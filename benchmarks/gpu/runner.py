"""Runs each section in its own process, and keeps its rows whatever happens to it.

The results are one JSON file, replaced as a whole for every row. A section whose process crashes or
hangs, or whose device no longer answers, is started again without the task that was open. At its
time limit it is killed.
"""

import argparse
import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import OUTPUT, device_name
from benchmarks.gpu import worker
from stree_jax.measuring.report import write_json

STARTING = 90.0  # seconds in which a process finds its device, makes its models, or ends
LATEST = 1.25  # times the share of a section: when it is killed
NOT_BEGUN, DONE = "not begun", "done"
AND_MORE = "and what comes after it"


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
        return write_json(self.path, self.data)

    def commit(self, directory: Path) -> Path:
        """Writes them into another directory as well, under the name of the device."""
        name = f"{self.path.stem}-{device_name(self.data['machine'])}.json"
        return write_json(directory / name, self.data)


def run_section(
    results: Results,
    name: str,
    seconds: float,
    limit: float,
    options: Mapping[str, Any],
    *,
    module: str = "benchmarks.gpu_session",
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
        job |= {"rows": [*note["rows"]], "seconds": began + seconds - time.monotonic()}
        in_progress: list[str] = []
        ended = None
        with contextlib.closing(_messages(job, began + limit)) as messages:
            for message in messages:
                match message:
                    case {"obstacle": text}:
                        raise NoGpu(text)
                    case {"machine": machine}:
                        results.describe(machine)
                    case {"open": names}:
                        in_progress = names
                    case {"row": row}:
                        note["rows"].append(row)
                        in_progress = []
                    case {"left_out": names}:
                        note["left_out"] = names
                    case {"ended": ended}:
                        pass
                save()
        if ended is None:
            note["state"] = "left some out" if note["left_out"] else DONE
        elif time.monotonic() >= began + limit:
            note |= {"state": "killed at its limit", "left_out": [*in_progress, AND_MORE]}
        elif len(in_progress) == 1:
            note["rows"].append({"task": in_progress[0], "failed": ended})
            save()
            continue
        elif in_progress:  # one of them: which?
            job["together"] = 1
            continue
        elif len(note["rows"]) > len(job["rows"]):  # the device broke after its last row
            continue
        else:
            note |= {"state": "failed", "failed": ended}
        save()
        return


def _messages(job: Mapping[str, Any], end: float) -> Iterator[dict[str, Any]]:
    """The messages of the process of a section, and how it `ended` if not at the end of its tasks.

    It is killed when it is silent for too long, at the `end`, or when no more messages are wanted.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker.main, args=(theirs, dict(job)), daemon=True)
    process.start()
    theirs.close()
    latest = time.monotonic() + STARTING
    try:
        while ours.poll(max(0.0, min(latest, end) - time.monotonic())):
            try:
                message = json.loads(ours.recv())
            except (EOFError, OSError):
                process.join()
                if process.exitcode:
                    yield {"ended": f"the process ended with {process.exitcode}"}
                return
            latest = time.monotonic() + message.get("seconds", STARTING)
            yield message
        yield {"ended": "stopped answering"}
    finally:
        process.kill()
        process.join()
        ours.close()
