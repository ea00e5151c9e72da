"""The benchmarks' parts on tiny shapes, so that a lent GPU does not find a typo."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import stree_jax as st
from benchmarks import common, gpu_session
from benchmarks.prompts import load_prompts
from benchmarks.shapes import MIXERS, MixerShape

KERNELS = ("xla", "pallas_interpret")


def test_the_gpu_session_says_that_there_is_no_gpu():
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_session"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert "no GPU here" in result.stdout


def test_kernel_errors_of_the_gpu_session():
    shapes = {"small": MixerShape(8, 16, 16, 8), "one group": MixerShape(8, 16, 32, 1)}
    rows = gpu_session.check_kernels(shapes, (1, 5), KERNELS)
    assert len(rows) == 2 * 2 * 2
    assert gpu_session.kernels_are_right(rows)
    rows[0]["errors"]["pallas_interpret"]["replay"] = 1e-3
    assert not gpu_session.kernels_are_right(rows)


def test_verify_steps_of_the_gpu_session():
    config = st.ModelConfig.tiny(head_dim=16, state_size=16)
    result = gpu_session.measure_steps(
        config,
        dtype="bfloat16",
        implementations=KERNELS,
        nodes=(1, 3),
        count=2,
        rounds=2,
        bandwidth=1e12,
        out_of_time=lambda: False,
    )
    assert [row["nodes"] for row in result["steps"]] == [1, 3]
    for row in result["steps"]:
        assert set(row["milliseconds"]) == set(KERNELS)
        assert all(value["median"] > 0 for value in row["milliseconds"].values())
    m = config.mamba2
    ssm, conv = m.inner_size * m.state_size, (m.conv_width - 1) * m.conv_channels
    assert result["state_bytes"] == len(config.layers) * 4 * (ssm + conv)
    json.dumps(result)


def test_mixer_shapes_are_the_presets():
    for name in ("mamba2-130m", "mamba2-2.7b"):
        mixer = st.ModelConfig.preset(name).mamba2
        want = MixerShape(mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.num_groups)
        assert MIXERS[name] == want


@pytest.mark.parametrize("count", [1, 16])
def test_prompts(count, monkeypatch, tmp_path):
    source, prompts = load_prompts(count)
    assert len(prompts) == count
    assert all(prompts)
    if source != "built-in":
        assert len(set(prompts)) == count
    monkeypatch.setattr("benchmarks.prompts.SHARED", tmp_path / "nowhere")
    assert load_prompts(count)[0] == "built-in"


def test_timing_is_interleaved():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    ticks = []
    seconds = common.interleaved(calls, rounds=2, progress=lambda: ticks.append(1))
    assert order == ["a", "b", "c"] * 2
    assert len(ticks) == 6
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 2)
    assert common.summary([1.0, 2.0, 9.0])["median"] == 2.0


def test_results_are_written_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    path = common.write_json("x", {"a": np.float64(1).item()})
    assert json.loads(path.read_text()) == {"a": 1.0}
    with pytest.raises(TypeError):
        common.write_json("y", {"a": object()})
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
