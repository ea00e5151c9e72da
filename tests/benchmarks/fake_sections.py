"""Sections whose tasks do to their process what a GPU could do to it; sections in this process."""

import os
import signal
import time

from benchmarks.gpu import worker
from benchmarks.gpu.tasks import Section, Task


def done(section, options=None, rows=(), seconds=600.0, works=lambda: True, **job):
    """A section in this process: its exit code, its new rows and all messages."""
    messages = []
    job |= {"options": options or {}, "rows": list(rows), "seconds": seconds}
    code = worker.do(section, job, lambda **message: messages.append(message), works)
    return code, [message["row"] for message in messages if "row" in message], messages


def die(_=None):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(_=None):
    raise RuntimeError("no memory")


def tasks(**of_b):
    """Tasks a, b and c; b is another one."""
    usual = Task("", lambda: 1, lambda prepared: {"value": prepared})
    return lambda *_: [usual._replace(name=n, **(of_b if n == "b" else {})) for n in "abc"]


SECTIONS = {
    "fine": Section(tasks(), 1.0),
    "dies": Section(tasks(measure=die), 1.0),
    "dies early": Section(tasks(prepare=die), 1.0),
    "hangs": Section(tasks(measure=lambda _: time.sleep(600)), 1.0, seconds=1.0),
    "hangs for long": Section(tasks(measure=lambda _: time.sleep(600)), 1.0),
    "refuses": Section(tasks(measure=refuse), 1.0),
    "refuses early": Section(tasks(prepare=refuse), 1.0),
    "cannot begin": Section(lambda *_: refuse(), 1.0),
}
