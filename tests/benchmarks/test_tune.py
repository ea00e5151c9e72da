"""Tables of block sizes, and the tuner that writes them."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import CASES
from benchmarks.cases.base import Problem
from benchmarks.gpu import tune
from pallas_kernels import gated_rms_norm, tuning
from pallas_kernels.ssd import config

SSD = {"positions": 64, "state": 2048, "part": 64, "num_warps": 8, "num_stages": 2}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """A directory of tables, empty at first."""
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    tuning.load.cache_clear()
    yield tmp_path
    tuning.load.cache_clear()


def write(tables, **table):
    (tables / "cpu.json").write_text(json.dumps({"device": "cpu", "blocks": {}} | table))


def test_without_a_table_there_are_the_defaults(tables):
    assert config.block_sizes("bfloat16") == config.DEFAULTS["bfloat16"]
    assert config.block_sizes(jnp.float32) == config.DEFAULTS["float32"]


def test_a_table_comes_before_the_defaults(tables):
    write(tables, blocks={"ssd": {"bfloat16": SSD}}, note="not read")
    assert config.block_sizes("bfloat16") == config.BlockSizes(**SSD)
    assert config.block_sizes("float32") == config.DEFAULTS["float32"]


def test_a_table_of_another_device_is_not_looked_at(tables):
    (tables / "nvidia-h200.json").write_text("damaged")
    assert config.block_sizes("bfloat16") == config.DEFAULTS["bfloat16"]


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a JSON object"),
        ({"device": "NVIDIA H200"}, "'NVIDIA H200', which does not match the file name"),
        ({"blocks": None}, "no object 'blocks'"),
        ({"blocks": {"scan": {}}}, "an op 'scan'"),
        ({"blocks": {"ssd": {"int8": SSD}}}, "a case 'int8'"),
        ({"blocks": {"ssd": {"bfloat16": {"positions": 16}}}}, "fields must be"),
        ({"blocks": {"ssd": {"bfloat16": SSD | {"rows": 1}}}}, "fields must be"),
        (
            {"blocks": {"ssd": {"bfloat16": SSD | {"positions": 24}}}},
            "positions = 24 is not a power",
        ),
        ({"blocks": {"ssd": {"bfloat16": SSD | {"positions": "16"}}}}, "positions = '16'"),
        ({"blocks": {"ssd": {"bfloat16": []}}}, "fields must be"),
    ],
)
def test_a_damaged_table_is_an_error_that_names_the_file(tables, table, complaint):
    if isinstance(table, str):
        (tables / "cpu.json").write_text(table)
    else:
        write(tables, **table)
    with pytest.raises(ValueError, match=rf"{tables}/cpu.json is no table.*{complaint}"):
        config.block_sizes("bfloat16")


def test_every_space_is_that_of_its_kernel():
    assert set(tune.SPACES) == set(tuning.OPS)
    for name, space in tune.SPACES.items():
        assert space.defaults is tuning.defaults(name)
        for default in space.defaults.values():
            assert set(space.values) <= {field.name for field in dataclasses.fields(default)}
        for tiny in (False, True):
            for _, problem in tune.problems_of(name, (1, 64), 1, tiny=tiny):
                assert space.case(problem) in space.defaults


def test_attention_is_tuned_in_all_cases(monkeypatch):
    timer = tune.Timer(interpret=True, count=1, rounds=1)
    monkeypatch.setattr(
        tune.Timer, "microseconds", lambda self, case, problem, candidates: [1.0] * len(candidates)
    )
    for name, space in tune.SPACES.items():
        if not CASES[space.timed].has_cache:
            continue
        best, rows = tune.tune(name, tune.problems_of(name, (1, 64), 1, tiny=False), timer=timer)
        assert best == {case: dataclasses.asdict(choice) for case, choice in space.defaults.items()}
        for case, field in itertools.product(best, space.values):
            tried = {row["blocks"][field] for row in rows if row["case"] == case}
            assert tried == {best[case][field], *space.values[field]}


@pytest.mark.parametrize("rows", [16, 64])
def test_a_choice_gives_block_sizes(rows):
    """With 16 rows there are four times as many programs as with 64."""
    case = CASES["tree_attention"]
    problem = Problem(case.shapes["MambaInLlama-8B"], 64, "bfloat16", 1, 4096)
    choice = tune.SPACES["tree_attention"].defaults["bfloat16"]
    run = functools.partial(
        case.with_blocks, blocks=dataclasses.replace(choice, rows=rows), interpret=True
    )
    jax.eval_shape(run, *jax.eval_shape(lambda: case.operands(problem)))


def test_the_shipped_tables_can_be_read():
    for path in tuning.DIRECTORY.glob("*.json"):
        assert tuning.load(path)


def test_the_winner_is_clearly_faster_everywhere_on_average():
    assert tune.winner([[10.0, 9.9, 12.0]]) == 0  # 1 % is noise
    assert tune.winner([[10.0, 9.0, 12.0], [10.0, 10.0, 5.0]]) == 2
    assert tune.winner([[10.0, 9.0, "wrong"], [10.0, 9.0, 1.0]]) == 1
    with pytest.raises(ValueError, match="starts from are out: wrong"):
        tune.winner([["wrong", 1.0]])


def test_without_a_gpu_the_tuner_refuses(tmp_path, capsys):
    with pytest.raises(SystemExit, match="nothing to tune: the device is a CPU"):
        tune.main([])
    with pytest.raises(SystemExit):
        tune.main(["--interpret"])
    assert "needs an --output" in capsys.readouterr().err


def test_the_tuner_writes_a_table_that_the_kernels_use(tables, monkeypatch, capsys):
    values = {"num_warps": (4, 8), "block": (16, 4096)}
    monkeypatch.setitem(tune.SPACES, "rms_norm", tune.SPACES["rms_norm"]._replace(values=values))
    monkeypatch.setattr(tune, "GAIN", np.inf)  # something else than the default, always
    write(tables, blocks={"ssd": {"bfloat16": SSD}})
    small = ["--kernels", "rms_norm", "--nodes", "3", "--count", "2", "--rounds", "1"]
    tune.main(["--interpret", "--output", str(tables), *small])
    table = json.loads((tables / "cpu.json").read_text())
    assert table["blocks"]["ssd"] == {"bfloat16": SSD}
    (case,) = table["blocks"]["rms_norm"]
    assert case == "groups to 4096"
    line = json.loads(capsys.readouterr().out.splitlines()[-1])["tune"]
    assert line["timed"] == 2 * 2 * 2
    assert line["failed_or_wrong"] == 0
    rows = json.loads((tables / "tune-cpu.json").read_text())["rows"]
    assert {row["blocks"]["block"] for row in rows} == {16, 4096}
    y = jnp.ones((2, 32))
    got = jax.jit(lambda y: gated_rms_norm(y, y, y[0], implementation="pallas_interpret"))(y)
    np.testing.assert_allclose(got, 1, rtol=1e-4)


def test_a_wrong_candidate_is_out():
    (_, problem), *_ = tune.problems_of("rms_norm", (2,), 1, tiny=True)
    timer = tune.Timer(interpret=True, count=2, rounds=1)
    case = CASES["gated_rms_norm"]
    operands = case.operands(problem)
    blocks = tune.SPACES["rms_norm"].defaults["groups to 4096"]
    wrong = timer.compiled(case, operands, (2 * operands[0],), blocks)
    assert wrong.startswith("wrong: output is off by")
    failed = timer.compiled(case, operands, (operands[0],), "no blocks")
    assert failed.startswith("failed: ")
