"""The search for block sizes, and the table that it writes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tune
from benchmarks.cases import CASES
from benchmarks.gpu import search
from benchmarks.gpu.spaces import SPACES
from pallas_kernels import gated_rms_norm, tuning
from tests.benchmarks.fake_sections import done

SSD = {"positions": 64, "state": 2048, "part": 64, "num_warps": 8, "num_stages": 2}


def options_of(**changes):
    options = dict(kernels=list(SPACES), shapes=None, dtypes=list(search.DTYPES))
    return options | dict(nodes=[1, 64], count=1, rounds=1, smoke=False) | changes


def searched(options, rows=(), seconds=600.0):
    """The rows of a search, and the messages of its process."""
    code, *found = done(search.SECTIONS["tune"], options, rows, seconds)
    assert code == 0
    return found


@pytest.mark.parametrize("name", SPACES)
def test_every_space_is_that_of_its_kernel(name):
    space = SPACES[name]
    assert space.defaults is tuning.defaults(name)
    for default in space.defaults.values():
        assert set(space.values) <= {field.name for field in dataclasses.fields(default)}
    problems = search.problems_of(name, options_of())
    assert {space.case(problem) for _, problem in problems} == set(space.defaults)


@pytest.fixture
def untimed(monkeypatch):
    """Candidates are neither compiled nor timed; all are equally fast."""
    monkeypatch.setattr(search, "programs", lambda *arguments: (None, arguments[-1]))
    monkeypatch.setattr(search, "microseconds", lambda *arguments: [1.0] * len(arguments[-1]))


def test_only_what_was_asked_for_is_tuned_and_first_fields_come_first(untimed):
    chosen = {"shapes": ["mamba2-2.7b", "MambaInLlama-8B"], "dtypes": ["bfloat16"], "nodes": [64]}
    rows, _ = searched(options_of(kernels=["tree_scan", "tree_attention_layer"], **chosen))
    steps = [
        (r["kernel"], r["case"], r["field"], {one["shape"] for one in r["timed"]}) for r in rows
    ]
    assert steps[:4] == [
        ("tree_scan", "bfloat16", "state", {"mamba2-2.7b"}),
        ("tree_scan", "bfloat16, large heads", "state", {"MambaInLlama-8B"}),
        ("tree_attention_layer", "bfloat16", "busy_warps", {"MambaInLlama-8B"}),
        ("tree_scan", "bfloat16", "num_warps", {"mamba2-2.7b"}),
    ]


def test_a_search_resumes_from_the_best_so_far(untimed):
    options = options_of(kernels=["ssd"], dtypes=["bfloat16"], nodes=[64])
    earlier = {"task": "ssd, bfloat16, state", "kernel": "ssd", "case": "bfloat16", "so_far": SSD}
    rows, _ = searched(options, [earlier])
    assert [row["field"] for row in rows] == ["positions", "part", "num_warps", "num_stages"]
    assert rows[-1]["so_far"] == SSD
    _, messages = searched(options, [earlier], seconds=-1.0)
    assert messages == [{"left_out": [row["task"] for row in rows]}]


def test_the_winner_is_clearly_faster_everywhere_on_average():
    assert search.winner([[10.0, 9.9, 12.0]]) == 0  # 1 % is noise
    assert search.winner([[10.0, 9.0, 12.0], [10.0, 10.0, 5.0]]) == 2
    assert search.winner([[10.0, 9.0, "wrong"], [10.0, 9.0, 1.0]]) == 1
    assert search.winner([["wrong", 3.0, 2.0]]) == 2
    with pytest.raises(ValueError, match="all block sizes are out: wrong"):
        search.winner([["wrong", 1.0], [1.0, "failed"]])


def test_without_a_gpu_the_tuner_refuses(tmp_path, capsys):
    with pytest.raises(SystemExit, match="nothing to tune: the device is a CPU"):
        tune.main([])
    with pytest.raises(SystemExit):
        tune.main(["--smoke"])
    assert "needs an --output" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tuner_writes_a_table_that_the_kernels_use(tmp_path, monkeypatch, capsys):
    """And that keeps what was not tuned."""
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    table = {"device": "cpu", "blocks": {"ssd": {"bfloat16": SSD}}}
    (tmp_path / "cpu.json").write_text(json.dumps(table))
    small = ["--kernels", "rms_norm", "--nodes", "3", "--count", "2", "--rounds", "1"]
    tune.main(["--smoke", "--output", str(tmp_path), *small])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])["tune"]
    assert line["timed"] > 4
    assert line["failed_or_wrong"] == line["left_out"] == 0
    (section,) = json.loads((tmp_path / "tune.json").read_text())["sections"].values()
    assert [row["field"] for row in section["rows"]] == ["block", "num_warps"]
    blocks = json.loads((tmp_path / "cpu.json").read_text())["blocks"]
    assert blocks["rms_norm"] == {"groups to 4096": section["rows"][-1]["so_far"]}
    assert blocks["ssd"] == {"bfloat16": SSD}
    y = jnp.ones((2, 32))
    got = jax.jit(lambda y: gated_rms_norm(y, y, y[0], implementation="pallas_interpret"))(y)
    np.testing.assert_allclose(got, 1, rtol=1e-4)


def test_a_wrong_candidate_is_out():
    options = options_of(nodes=[2], smoke=True, count=2)
    (_, problem), *_ = search.problems_of("rms_norm", options)
    case = CASES["gated_rms_norm"]
    operands = case.operands(problem)
    blocks = SPACES["rms_norm"].defaults["groups to 4096"]
    wrong = search.program(options, case, operands, (2 * operands[0],), blocks)
    assert wrong.startswith("wrong: output is off by")
    failed = search.program(options, case, operands, (operands[0],), "no blocks")
    assert failed.startswith("failed: ")
