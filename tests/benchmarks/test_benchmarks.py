"""Parts that all benchmarks share: options, clock, tables, results, entry points."""

import argparse
import subprocess
import sys
from pathlib import Path

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


def test_prompts(monkeypatch, tmp_path, capsys):
    source, prompts = load_prompts(16)
    assert len(prompts) == 16
    assert source == "built-in" or len(set(prompts)) == 16
    monkeypatch.setattr("benchmarks.prompts.SHARED", tmp_path / "nowhere")
    assert load_prompts(1)[0] == "built-in"
    assert "4 built-in ones in turn, because" in capsys.readouterr().out


def test_the_clock_is_interleaved():
    """Outputs are those of the untimed calls; each item has its own order in each round."""
    order = []
    calls = {f"{n} times": lambda x, n=n: (order.append((x, n)), n * x)[1] for n in (2, 3, 4)}
    outputs, seconds = common.timed("", calls, [1, 2], 9)
    assert outputs == {"2 times": [2, 4], "3 times": [3, 6], "4 times": [4, 8]}
    assert {name: taken.shape for name, taken in seconds.items()} == dict.fromkeys(calls, (9, 2))
    assert all((taken > 0).all() for taken in seconds.values())
    timed = [tuple(order[i : i + 3]) for i in range(6, 60, 3)]
    assert [{*each} for each in timed] == [{(x, n) for n in (2, 3, 4)} for x in (1, 2)] * 9
    assert len({*timed}) > 2


def test_tables_are_records_and_formats(capsys):
    records = [{"name": "a", "speed": {"median": 1.234}}, {"name": "b", "speed": {"median": 2}}]
    common.Table("Speeds", records, {"way": "{name}", "speed": "{speed[median]:.2f}x"}).show()
    output = capsys.readouterr().out
    assert all(word in output for word in ("Speeds", "way", "1.23x", "2.00x"))


def test_what_the_end_needs_is_checked_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    """Only `--commit` overwrites results."""

    def options_of(*arguments):
        return common.read_options(argparse.ArgumentParser(prog="b"), arguments)

    monkeypatch.chdir(tmp_path)
    assert options_of().output == common.OUTPUT
    assert options_of("--output", "a/b").output == Path("a/b")
    assert {str(path) for path in Path().rglob("*")} == {str(common.OUTPUT), "a", "a/b"}
    assert options_of("--commit").output == common.RESULTS
    Path("file").touch()
    for arguments, message in (
        (["--output", "file"], "b: error: cannot write results to"),
        (["--output", "a", "--commit"], "--commit: not allowed with argument"),
    ):
        with pytest.raises(SystemExit, match="^2$"):
            options_of(*arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu_session", "tune"])
def test_a_gpu_session_needs_a_plain_checkout_only(name):
    """`stree_jax.convert` exists in an installed package only."""
    code = (
        "import sys; sys.modules['stree_jax.convert'] = None;"
        f"import benchmarks.{name}; assert 'stree_jax.cli' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
