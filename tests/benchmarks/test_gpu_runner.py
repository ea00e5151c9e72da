"""Nothing that happens to the process of a section may cost more than a row."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import runner, worker
from benchmarks.gpu.runner import Results
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.tasks import Section, Task
from tests.benchmarks import fake_sections

CHECKOUT = Path(__file__).parents[2]
HEAD = {"question": "?", "smoke": True}


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.json", HEAD)


def do(section, **job):
    """The exit code of a section's process, its rows as (task, failed), and its messages."""
    code, rows, messages = fake_sections.do(section, **job)
    return code, {row["task"]: row.get("failed") for row in rows}, messages


def test_a_section_does_tasks_that_have_no_row_yet_in_the_time_it_has():
    fine = fake_sections.SECTIONS["fine"]
    code, rows, messages = do(fine, rows=[{"task": "b"}])
    assert (code, rows) == (0, {"a": None, "c": None})
    assert messages[-1]["row"] == {"task": "c", "value": 1}
    assert do(fine, seconds=-1.0) == (0, {}, [{"left_out": ["a", "b", "c"]}])


def test_a_failed_task_is_a_row_and_a_broken_device_ends_the_process():
    """Tasks after the one that broke the device would all fail."""
    section = fake_sections.SECTIONS["refuses"]
    failed = {"a": None, "b": "RuntimeError: no memory"}
    assert do(section)[:2] == (0, failed | {"c": None})
    assert do(section, works=lambda: False)[:2] == (worker.BROKEN, failed)


def test_the_task_that_broke_the_device_is_unknown_while_several_are_prepared():
    section = Section(fake_sections.tasks(prepare=fake_sections.refuse), 1.0)
    code, rows, messages = do(section, works=lambda: False)
    assert (code, rows, messages[-1]["open"]) == (worker.BROKEN, {}, ["a", "b", "c"])
    _, rows, _ = do(section, works=lambda: False, together=1)
    assert rows == {"a": None, "b": "RuntimeError: no memory"}


def test_nothing_is_prepared_while_a_timed_task_is_measured():
    busy = []

    def prepare():
        busy.append(1)
        time.sleep(0.05)
        busy.pop()

    tasks = [Task(str(i), prepare, lambda _: {"busy": len(busy)}) for i in range(6)]
    _, _, messages = do(Section(lambda *_: tasks, 1.0, together=3))
    assert [m["row"]["busy"] for m in messages if "row" in m] == [0] * 6


def test_results_of_another_run_are_not_mixed_in(results):
    machine = {"device": "a", "jax": "1"}
    results.describe(machine)
    results.save()
    again = Results(results.path, HEAD)
    assert again.data == results.data
    with pytest.raises(ValueError, match="smoke = True, this run False; choose another --output"):
        Results(results.path, HEAD | {"smoke": False})
    with pytest.raises(ValueError, match="device = 'a', this run 'b'; choose another --output"):
        again.describe(machine | {"device": "b"})


def run_section(results, name, seconds=100.0, limit=120.0):
    """The section's entry in the file, after a run."""
    options = {"smoke": True}
    runner.run_section(results, name, seconds, limit, options, module=fake_sections.__name__)
    stored = json.loads(results.path.read_text())["sections"]
    assert stored == results.data["sections"]
    return stored[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("dies", "the process ended with -9"),
        ("dies early", "the process ended with -9"),
        ("hangs", "stopped answering"),
    ],
)
def test_a_task_that_crashes_or_hangs_is_one_failed_row(results, name, failed):
    note = run_section(results, name)
    assert note["state"] == "done"
    rows = {row["task"]: row.get("failed") for row in note["rows"]}
    assert rows == {"a": None, "b": failed, "c": None}


@pytest.mark.slow
def test_a_section_ends_at_its_limit_and_resumes_in_the_next_run(results):
    assert run_section(results, "cannot begin")["failed"] == "the process ended with 1"
    began = time.monotonic()
    note = run_section(results, "hangs for long", 10.0, 15.0)
    assert time.monotonic() - began < 15.0 * 1.1
    assert [row["task"] for row in note["rows"]] == ["a"]
    assert note["state"] == "killed at its limit"
    assert note["left_out"] == ["b", runner.AND_MORE]
    results.data["sections"]["fine"] = note | {"rows": [{"task": "a", "value": 7}]}
    note = run_section(results, "fine")
    assert [row["value"] for row in note["rows"]] == [7, 1, 1]
    assert (note["state"], note["left_out"]) == ("done", [])


def session(output, *sections):
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--smoke", "--minutes", "15"]
    command += ["--output", str(output), "--sections", *(sections or SECTIONS)]
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)


def workers_of(process):
    """The processes that a session has started: those of sections, and Python's tracker."""
    command = ["pgrep", "-P", str(process.pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_killed_session_leaves_its_rows_and_no_process(tmp_path):
    """The next run keeps the rows, and measures what is missing."""
    names = ("bandwidth", "kernels", "batch")

    def rows():
        sections = json.loads((tmp_path / "gpu-session.json").read_text())["sections"]
        return [(name, row) for name, note in sections.items() for row in note["rows"]]

    process, end = session(tmp_path, *names), time.monotonic() + 120
    while not any(tmp_path.glob("*.json")) or not rows():
        assert time.monotonic() < end
        time.sleep(0.1)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    written, end = rows(), time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(is_alive, workers))

    line = json.loads(session(tmp_path, *names).communicate()[0].splitlines()[-1])["gpu_session"]
    assert (line["left_out"], set(line["sections"])) == (0, set(names))
    assert all(row in rows() for row in written)
    assert len(rows()) == len({(name, row["task"]) for name, row in rows()}) == 1 + 3 + 1


@pytest.mark.slow
def test_the_smoke_run_reaches_everything(tmp_path):
    process = session(tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    line = json.loads(out.splitlines()[-1])["gpu_session"]
    assert line["right"]
    assert line["left_out"] == 0
    assert line["sections"] == dict.fromkeys(SECTIONS, "done")
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_text())
    assert list(data["sections"]) == list(SECTIONS)
    assert all(note["rows"] for note in data["sections"].values())
    assert data["sections"]["kernels"]["rows"][0]["floor_microseconds"] > 0
    assert data["machine"]["versions"]["jax"] == data["machine"]["jax"]
