"""Nothing that happens to the process of a section may cost more than a row."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_session
from benchmarks.gpu import runner
from benchmarks.gpu.runner import Results
from benchmarks.gpu.worker import BROKEN
from tests.benchmarks import fake_sections
from tests.benchmarks.fake_sections import SECTIONS, done

HEAD = {"question": "?", "smoke": True}


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.json", HEAD)


def do(name, **job):
    """The exit code of a section's process, its rows as (task, failed), and its messages."""
    code, rows, messages = done(SECTIONS[name], **job)
    return code, {row["task"]: row.get("failed") for row in rows}, messages


def test_a_section_does_tasks_that_have_no_row_yet_in_the_time_it_has():
    code, rows, messages = do("fine", rows=[{"task": "b"}])
    assert (code, rows) == (0, {"a": None, "c": None})
    assert messages[-1]["row"] == {"task": "c", "value": 1}
    assert do("fine", seconds=-1.0) == (0, {}, [{"left_out": ["a", "b", "c"]}])


def test_a_failed_task_is_a_row_and_a_broken_device_ends_the_process():
    """Tasks after the one that broke the device would all fail."""
    failed = {"a": None, "b": "RuntimeError: no memory"}
    assert do("refuses")[:2] == (0, failed | {"c": None})
    assert do("refuses", works=lambda: False)[:2] == (BROKEN, failed)
    # Which one broke it is unknown while several are prepared.
    code, rows, messages = do("refuses early", works=lambda: False)
    assert (code, rows, messages[-1]["open"]) == (BROKEN, {}, ["a", "b", "c"])
    assert do("refuses early", works=lambda: False, together=1)[1] == failed


def test_results_of_another_run_are_not_mixed_in(results):
    results.describe({"device": "a", "jax": "1"})
    again = Results(results.save(), HEAD)
    assert again.data == results.data
    with pytest.raises(ValueError, match="smoke = True, this run False; choose another --output"):
        Results(results.path, HEAD | {"smoke": False})
    with pytest.raises(ValueError, match="device = 'a', this run 'b'; choose another --output"):
        again.describe({"device": "b", "jax": "1"})


def run_section(results, name, seconds=100.0, limit=120.0):
    """The section's entry in the file, after a run."""
    options = {"smoke": True}
    runner.run_section(results, name, seconds, limit, options, module=fake_sections.__name__)
    stored = json.loads(results.path.read_text())["sections"]
    assert stored == results.data["sections"]
    return stored[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dies", "dies early", "hangs"])
def test_a_task_that_crashes_or_hangs_is_one_failed_row(results, name):
    note = run_section(results, name)
    assert note["state"] == "done"
    failed = "stopped answering" if name == "hangs" else "the process ended with -9"
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


def session(output):
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--smoke", "--minutes", "15"]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    checkout = Path(__file__).parents[2]
    return subprocess.Popen([*command, "--output", output], cwd=checkout, text=True, **pipes)


@pytest.mark.slow
def test_a_killed_session_leaves_its_rows_and_no_process(tmp_path):
    """The next run keeps the rows, measures what is missing, and reaches everything."""

    def rows(*names):
        notes = json.loads((tmp_path / "gpu-session.json").read_text())["sections"]
        return [(name, row) for name in names or notes for row in notes[name]["rows"]]

    process, end = session(tmp_path), time.monotonic() + 120
    while not any(tmp_path.glob("*.json")) or not rows():
        assert time.monotonic() < end
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=10)  # until the process of the section has closed its end, too
    written, process = rows(), session(tmp_path)
    out, errors = process.communicate()
    assert process.returncode == 0, out + errors
    line = json.loads(out.splitlines()[-1])["gpu_session"]
    assert (line["right"], line["left_out"]) == (True, 0)
    assert line["sections"] == dict.fromkeys(gpu_session.SECTIONS, "done")
    assert all(row in rows() for row in written)
    assert len(rows()) == len({(name, row["task"]) for name, row in rows()})
    assert {name for name, _ in rows()} == {*gpu_session.SECTIONS}
    assert len(rows("bandwidth", "kernels", "batch")) == 1 + 3 + 1
    assert rows("kernels")[0][1]["floor_microseconds"] > 0
