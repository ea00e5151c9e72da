"""Parts that all benchmarks share: options, clock, tables, results, entry points."""

import argparse
from pathlib import Path

import pytest

from benchmarks import common


def test_the_clock_is_interleaved():
    """Outputs are those of the untimed calls; each item has its own order in each round."""
    order = []
    calls = {str(n): lambda x, n=n: (order.append((x, n)), n * x)[1] for n in (2, 3, 4)}
    outputs, seconds = common.timed("", calls, [1, 2], 9)
    assert outputs == {"2": [2, 4], "3": [3, 6], "4": [4, 8]}
    assert all(taken.shape == (9, 2) and (taken >= 0).all() for taken in seconds.values())
    timed = [tuple(order[i : i + 3]) for i in range(6, 60, 3)]
    assert [{*each} for each in timed] == [{(x, n) for n in (2, 3, 4)} for x in (1, 2)] * 9
    assert len({*timed}) > 2


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
