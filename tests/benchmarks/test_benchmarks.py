"""Parts that all benchmarks share: options, clock, tables, results, entry points."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stree_jax as st
from benchmarks import common
from benchmarks.prompts import load_prompts
from benchmarks.shapes import MIXERS, MixerShape


def test_mixer_shapes_are_the_presets():
    for name in ("mamba2-130m", "mamba2-2.7b"):
        mixer = st.ModelConfig.preset(name).mamba2
        want = MixerShape(mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.num_groups)
        assert MIXERS[name] == want


@pytest.mark.parametrize("count", [1, 16])
def test_prompts(count, monkeypatch, tmp_path, capsys):
    source, prompts = load_prompts(count)
    assert len(prompts) == count
    assert all(prompts)
    if source != "built-in":
        assert len(set(prompts)) == count
    monkeypatch.setattr("benchmarks.prompts.SHARED", tmp_path / "nowhere")
    assert load_prompts(count)[0] == "built-in"
    assert "4 built-in ones in turn, because" in capsys.readouterr().out


def test_timing_is_interleaved():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    ticks = []
    seconds = common.interleaved(calls, rounds=9, progress=lambda: ticks.append(1))
    rounds = ["".join(order[i : i + 3]) for i in range(0, 27, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert len(ticks) == 27
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 9)
    assert common.summary([1.0, 2.0, 9.0])["median"] == 2.0


def test_outputs_are_those_of_the_untimed_calls():
    calls = {"double": lambda item: (order.append(item), 2 * item)[1], "triple": lambda x: 3 * x}
    order = []
    outputs, seconds = common.timed("", calls, [1, 2], 3)
    assert outputs == {"double": [2, 4], "triple": [3, 6]}
    assert {name: taken.shape for name, taken in seconds.items()} == dict.fromkeys(calls, (3, 2))
    assert order == [1, 2] * 4
    assert all((taken > 0).all() for taken in seconds.values())


def test_a_table_is_records_and_formats(capsys):
    records = [{"name": "a", "speed": {"median": 1.234}}, {"name": "b", "speed": {"median": 2}}]
    common.Table("Speeds", records, {"way": "{name}", "speed": "{speed[median]:.2f}x"}).show()
    output = capsys.readouterr().out
    assert all(word in output for word in ("Speeds", "way", "1.23x", "2.00x"))


def test_panels(tmp_path):
    lines = common.Panel("n", "t", {"a": ([1, 2], [3, 4]), "a, T = 1": ([1, 2], [3, 4])})
    bars = common.Panel(bars={"T = 0": {"x": 1.0, "y": 2.0}, "T = 1": {"x": 1.0}})
    common.draw(tmp_path / "both.png", [lines, bars])
    common.draw(tmp_path / "one.png", [bars])
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "one.png").stat().st_size > 1000


def test_results_are_written_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    path = common.write_json("x", {"a": np.float64(1).item()})
    assert json.loads(path.read_text()) == {"a": 1.0}
    with pytest.raises(TypeError):
        common.write_json("y", {"a": object()})
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def options_of(*arguments, **needs):
    return common.read_options(argparse.ArgumentParser(prog="b"), list(arguments), **needs)


def test_the_committed_results_are_overwritten_on_request_only(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert options_of().output == common.OUTPUT
    assert options_of("--output", "a/b").output == Path("a/b")
    assert {str(path) for path in tmp_path.rglob("*")} == {
        str(tmp_path / name) for name in ("benchmark-results", "a", "a/b")
    }
    assert options_of("--commit").output == common.RESULTS


def test_what_the_end_needs_is_checked_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    """A run of eight minutes died for want of matplotlib."""
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments, needs, message in (
        (["--output", str(tmp_path)], {"plots": True}, "b: error: the plot needs matplotlib"),
        (["--output", str(tmp_path / "file")], {}, "b: error: cannot write results to"),
        (["--output", str(tmp_path), "--commit"], {}, "--commit: not allowed with argument"),
    ):
        with pytest.raises(SystemExit) as exit:
            options_of(*arguments, **needs)
        assert exit.value.code == 2
        assert message in capsys.readouterr().err
    assert options_of("--output", str(tmp_path)).output == tmp_path


def test_every_benchmark_that_writes_results_has_the_options():
    """`read_options` of `common` is the one place that chooses the directory."""
    for file in Path(common.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if file.name != "common.py" and ("write_json(" in text or " save(" in text):
            assert "read_options" in text or file.name in ("report.py", "runner.py"), file
        assert "RESULTS" not in text or file.name == "common.py", file


def test_a_machine_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert common.machine()["commit"] is None


@pytest.mark.parametrize("name", ["gpu_session", "pictures", "static", "tune"])
def test_every_entry_point_has_a_main(name):
    """Those that are no experiment; without importing, since some set XLA's flags."""
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
