"""Nothing that happens to the process of a section may cost more than a row."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import runner, worker
from benchmarks.gpu.runner import Results, run_section
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.tasks import Section, Task
from tests.benchmarks import fake_sections

FAKE = "tests.benchmarks.fake_sections"
CHECKOUT = Path(__file__).parents[2]
HEAD = {"question": "?", "smoke": True}


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.json", HEAD)


def stored(results):
    return json.loads(results.path.read_text())["sections"]


def do(section, works=lambda: True, rows=(), seconds=60.0, **job):
    """The exit code of a section's process, and its messages."""
    messages = []
    job |= {"options": {}, "rows": list(rows), "seconds": seconds}
    code = worker.do(section, job, lambda **message: messages.append(message), works)
    return code, messages


def rows_in(messages):
    return {m["row"]["task"]: m["row"].get("failed") for m in messages if "row" in m}


def test_a_section_does_what_has_no_row_yet():
    code, messages = do(fake_sections.SECTIONS["fine"], rows=[{"task": "b"}])
    assert code == 0
    assert [m["row"] for m in messages if "row" in m] == [
        {"task": "a", "value": 1},
        {"task": "c", "value": 1},
    ]


def test_what_did_not_fit_is_listed():
    assert do(fake_sections.SECTIONS["fine"], seconds=-1.0) == (0, [{"left_out": ["a", "b", "c"]}])
    naps = fake_sections.SECTIONS["naps"]
    _, messages = do(naps, seconds=0.3)
    assert len(rows_in(messages)) == 2
    assert len(messages[-1]["left_out"]) == 98


@pytest.mark.parametrize("timed", [True, False])
def test_a_failed_task_is_a_row(timed):
    section = fake_sections.SECTIONS["refuses"]._replace(timed=timed)
    code, messages = do(section)
    assert code == 0
    assert rows_in(messages) == {"a": None, "b": "RuntimeError: no memory", "c": None}


def test_a_broken_device_ends_the_process():
    """Tasks after the one that broke it would all fail."""
    code, messages = do(fake_sections.SECTIONS["refuses"], works=lambda: False)
    assert code == worker.BROKEN
    assert rows_in(messages) == {"a": None, "b": "RuntimeError: no memory"}


@pytest.mark.parametrize("timed", [True, False])
def test_it_is_not_known_which_task_broke_the_device_while_several_are_prepared(timed):
    def fail():
        raise RuntimeError("illegal address")

    section = Section(fake_sections.tasks(prepare=fail), 1.0, timed=timed)
    code, messages = do(section, works=lambda: False)
    assert code == worker.BROKEN
    assert rows_in(messages) == {"a": None}
    assert messages[-2 if timed else -1]["open"] == (["a"] if timed else ["b", "c"])
    code, messages = do(section, works=lambda: False, together=1)
    assert rows_in(messages) == {"a": None, "b": "RuntimeError: illegal address"}


def test_nothing_is_prepared_while_a_timed_task_is_measured():
    busy = []

    def prepare():
        busy.append(1)
        time.sleep(0.05)
        busy.pop()

    tasks = [Task(str(i), lambda _: {"busy": len(busy)}, prepare) for i in range(6)]
    _, messages = do(Section(lambda options, rows: tasks, 1.0, together=3))
    assert [m["row"]["busy"] for m in messages if "row" in m] == [0] * 6


def test_results_of_another_run_are_not_mixed_in(results):
    machine = {"device": "a", "jax": "1"}
    results.describe(machine)
    results.save()
    again = Results(results.path, HEAD)
    assert again.data == results.data
    with pytest.raises(ValueError, match="smoke = True, this run False; choose another --output"):
        Results(results.path, HEAD | {"smoke": False})
    with pytest.raises(ValueError, match="is of device 'a', this is 'b'; choose another --output"):
        again.describe(machine | {"device": "b"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("fine", None),
        ("dies", "the process ended with -9"),
        ("dies early", "the process ended with -9"),
        ("hangs", "stopped answering"),
        ("refuses", "RuntimeError: no memory"),
    ],
)
def test_a_task_that_crashes_or_hangs_is_one_failed_row(results, name, failed):
    run_section(results, name, 100.0, 120.0, {"smoke": True}, module=FAKE)
    assert results.data["sections"][name]["state"] == "done"
    assert stored(results) == results.data["sections"]
    rows = {row["task"]: row.get("failed") for row in stored(results)[name]["rows"]}
    assert rows == {"a": None, "b": failed, "c": None}


@pytest.mark.slow
def test_a_section_that_cannot_begin_has_failed(results):
    run_section(results, "broken", 100.0, 120.0, {"smoke": True}, module=FAKE)
    assert stored(results)["broken"]["failed"] == "the process ended with 1"


@pytest.mark.slow
def test_a_section_ends_at_its_limit_and_goes_on_in_the_next_run(results):
    began = time.monotonic()
    run_section(results, "hangs for long", 10.0, 15.0, {"smoke": True}, module=FAKE)
    assert time.monotonic() - began < 15.0 * 1.1
    note = stored(results)["hangs for long"]
    assert [row["task"] for row in note["rows"]] == ["a"]
    assert note["state"] == "killed at its limit"
    assert note["left_out"] == ["b", runner.AND_MORE]
    results.data["sections"]["fine"] = note | {"rows": [{"task": "a", "value": 7}]}
    run_section(results, "fine", 60.0, 80.0, {"smoke": True}, module=FAKE)
    note = stored(results)["fine"]
    assert [row["value"] for row in note["rows"]] == [7, 1, 1]
    assert (note["state"], note["left_out"]) == ("done", [])


def workers_of(pid):
    """The living processes of sections that a session has started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_results_survive_kill_9_at_random_moments(tmp_path):
    """Of the session, whose sections end with it, and of a section, which is started again."""
    names = ("bandwidth", "kernels", "batch")
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--smoke", "--minutes", "8"]
    command += ["--output", str(tmp_path), "--sections", *names]
    path, rng = tmp_path / "gpu-session.json", random.Random()
    counts = [0]
    for _ in range(4):
        session = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(1, 15))
        workers = workers_of(session.pid)
        session.kill()
        session.wait()
        end = time.monotonic() + 10
        while any(map(is_alive, workers)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(is_alive, workers))
        if path.exists():
            sections = json.loads(path.read_text())["sections"]
            counts.append(sum(len(section["rows"]) for section in sections.values()))
    assert counts == sorted(counts)  # nothing that was written is lost

    session = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    time.sleep(rng.uniform(1, 10))
    for pid in workers_of(session.pid):
        os.kill(pid, signal.SIGKILL)
    out, _ = session.communicate()
    line = json.loads(out.splitlines()[-1])["gpu_session"]
    assert line["left_out"] == 0
    assert set(line["sections"]) == set(names)
    rows = list(
        itertools.chain(
            *([(name, row["task"]) for row in note["rows"]] for name, note in stored_at(path))
        )
    )
    assert len(rows) == len(set(rows)) == 1 + 3 + 1
    failed = [row for _, note in stored_at(path) for row in note["rows"] if "failed" in row]
    assert len(failed) <= 1  # the one that was open
    assert len(list(tmp_path.iterdir())) <= 3


def stored_at(path):
    return json.loads(path.read_text())["sections"].items()


@pytest.mark.slow
def test_the_smoke_run_reaches_everything(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--smoke", "--minutes", "15"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])["gpu_session"]
    assert line["right"]
    assert line["left_out"] == 0
    assert line["sections"] == dict.fromkeys(SECTIONS, "done")
    data = json.loads((tmp_path / "gpu-session.json").read_text())
    assert list(data["sections"]) == list(SECTIONS)
    assert all(note["rows"] for note in data["sections"].values())
    assert data["sections"]["kernels"]["rows"][0]["floor_microseconds"] > 0
    assert data["machine"]["versions"]["jax"] == data["machine"]["jax"]
    assert len(list(tmp_path.iterdir())) <= 8
