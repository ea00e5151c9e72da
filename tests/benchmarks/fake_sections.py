"""Sections whose tasks do to their process what a GPU could do to it."""

import os
import signal
import time

from benchmarks.gpu.tasks import Section, Task

FEW = ("a", "b", "c")


def fine(prepared):
    return {"value": prepared}


def die(_=None):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_):
    time.sleep(600)


def nap(_):
    time.sleep(0.2)
    return {"value": 1}


def refuse(_):
    raise RuntimeError("no memory")


def tasks(measure=fine, prepare=lambda: 1):
    """Three of them; the second is another one."""
    return lambda options, rows: [
        Task(name, measure if name == "b" else fine, prepare if name == "b" else lambda: 1)
        for name in FEW
    ]


def broken(options, rows):
    raise RuntimeError("no model")


SECTIONS = {
    "fine": Section(tasks(), 1.0),
    "dies": Section(tasks(die), 1.0),
    "dies early": Section(tasks(fine, die), 1.0),
    "hangs": Section(tasks(hang), 1.0, seconds=1.0),
    "hangs for long": Section(tasks(hang), 1.0),
    "refuses": Section(tasks(refuse), 1.0),
    "broken": Section(broken, 1.0),
    "naps": Section(lambda options, rows: [Task(str(i), nap) for i in range(100)], 1.0, together=1),
}
