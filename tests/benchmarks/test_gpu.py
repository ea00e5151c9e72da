"""Fifteen minutes of a GPU: nothing that happens to a process may cost more than a row."""

import json
import runpy
import subprocess

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import stree_jax as st
from benchmarks import gpu, peer_gpu


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu.PARTS)
def test_the_rehearsal(part, tiny_pair, tmp_path, monkeypatch):
    """Each part measures all of its rows, and all are right."""
    monkeypatch.setattr(st, "demo_path", tiny_pair.joinpath)
    rows = [name for name, _ in gpu.PARTS[part][0](gpu.TINY)]
    gpu.work(part, gpu.TINY, tmp_path / "gpu.json", 600.0)
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [*found[part]] == rows
    assert gpu.report(found) == []


@pytest.mark.parametrize(
    ("name", "kernels"), [("mamba2-2.7b", 17), ("Qwen3.5-0.8B", 19), ("mamba2-130m", 17)]
)
def test_the_models_of_the_real_sizes_are_lowered(name, kernels):
    """Eight layers have each of its kinds, and the kernels take their widths; each is there once
    a call of the model, and once more where some of its results are not needed."""
    config = gpu.FULL.models[name]
    short = config.with_layers(config.kinds[: gpu.FULL.layers])
    assert {*short.kinds} == {*config.kinds}
    model = nnx.merge(*st.HybridLM.abstract(short, dtype="bfloat16", implementation="pallas"))
    shapes = [jax.ShapeDtypeStruct((2, size), jnp.int32) for size in (gpu.FULL.positions, 13)]
    lowered = gpu.text_logits.trace(model, *shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == kernels


def refuse():
    raise RuntimeError("no memory")


@pytest.fixture
def rows(monkeypatch):
    """The rows of the part "device", which tests may change."""
    found = dict.fromkeys("abc", lambda: {"value": 1})
    monkeypatch.setitem(gpu.PARTS, "device", (lambda _: found.items(), 1.0))
    return found


def work(path, seconds=60.0):
    gpu.work("device", gpu.TINY, path, seconds)
    return json.loads(path.read_text())["parts"]["device"]


def test_rows_are_measured_once_and_those_that_were_cut_come_last(rows, tmp_path):
    path = tmp_path / "gpu.json"
    results = gpu.Results(path, "device")
    results.save("b", {"value": 2})
    results.save("a", {"cut": True})
    assert [*work(path, -1.0).values()] == [{"value": 2}, {"cut": True}]  # no time: none begins
    found = work(path)
    assert [(name, row["value"]) for name, row in found.items()] == [("b", 2), ("c", 1), ("a", 1)]
    assert work(path) == found
    results = gpu.Results(path, "device")
    results.data["machine"]["device"] = "another"
    results.save("b", {})
    with pytest.raises(SystemExit, match="is of another, jax"):
        work(path)


def test_a_row_that_fails_costs_no_other(rows, tmp_path):
    rows["b"] = refuse
    found = work(tmp_path / "gpu.json")
    assert [row.get("value") for row in found.values()] == [1, None, 1]
    assert found["b"]["failed"] == "RuntimeError: no memory"
    assert gpu.report({"device": found}) == ["device, b"]


def test_a_process_that_dies_begins_again_without_the_row(monkeypatch, tmp_path):
    """In "a" it dies, in "b" it is stopped."""
    path, left = tmp_path / "gpu.json", [("a", -9), ("c", 0), ("b", None)]

    def run(command, timeout, check):
        assert command[-2] == "--part=steps"
        assert float(command[-1].removeprefix("--seconds=")) <= 60.0
        name, code = left.pop(0)
        gpu.Results(path, "steps").save(name, {"right": True} if code == 0 else {"cut": True})
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        gpu.run_part("steps", [], path, 60.0, 80.0)
    found = gpu.Results(path, "steps").rows
    failed = {"failed": "the process ended with -9", "right": False}
    assert found == {"a": failed, "c": {"right": True}, "b": {"cut": True}}
    gpu.run_part("steps", [], path, 60.0, gpu.LEAST)  # too little time to begin
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    with pytest.raises(SystemExit, match="models: its process ended with 1"):
        gpu.run_part("models", [], path, 60.0, 80.0)


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.dispatch, "device_obstacle", lambda: "no GPU")
    with pytest.raises(SystemExit, match="nothing was measured: no GPU; --tiny"):
        gpu.work("device", gpu.FULL, tmp_path / "gpu.json", 60.0)
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.skipif(peer_gpu.OBSTACLE is None, reason="the peer runs here")
def test_without_its_packages_the_peer_says_what_to_install(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(peer_gpu.__file__, run_name="__main__")
    assert peer_gpu.PACKAGES in capsys.readouterr().err
