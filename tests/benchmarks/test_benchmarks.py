"""What the benchmarks share, and the benchmark of experts, on tiny shapes."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

import stree_jax as st
from benchmarks import common, experts
from benchmarks.prompts import load_prompts
from benchmarks.shapes import MIXERS, ExpertShape, MixerShape


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


def test_a_machine_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert common.machine()["commit"] is None


ENTRY_POINTS = (
    *("attention_share", "batch", "conversion", "decode", "experts", "gpu_session", "long_context"),
    *("lossless", "packed", "peer", "spills", "static", "temperature", "tree_size", "tune"),
)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_every_entry_point_has_a_main(name):
    """`python -m benchmarks.<name>`; without importing, since some set XLA's flags."""
    spec = importlib.util.find_spec(f"benchmarks.{name}")
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"benchmarks.{name}.__main__")
    assert spec.loader.get_source(spec.name).endswith('if __name__ == "__main__":\n    main()\n')


@pytest.mark.parametrize("name", ["gpu_session", "tune"])
def test_a_gpu_session_needs_a_plain_checkout_only(name):
    """`stree_jax.convert` exists in an installed package only."""
    code = (
        "import sys; sys.modules['stree_jax.convert'] = None;"
        f"import benchmarks.{name}; assert 'stree_jax.cli' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_experts(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setitem(experts.EXPERTS, "tiny", ExpertShape(32, 16, 4, 2, True))
    experts.main(["--shape", "tiny", "--tokens", "1", "5", "--rounds", "2"])
    (path,) = tmp_path.glob("experts-*.json")
    assert path.with_suffix(".png").exists()
    for row in json.loads(path.read_text())["rows"]:
        assert set(row["milliseconds"]) == {"products", "loops", "expert_mlps"}
        assert max(row["relative_difference"].values()) < 1e-5
