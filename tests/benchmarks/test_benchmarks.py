"""Parts that the benchmarks share, and experiments at their smallest sizes."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from benchmarks import common, decode, hierarchical, medusa, seed, serving, tuned
from benchmarks.decode import methods
from benchmarks.models import random_pair
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


def test_decode_measures_nothing_without_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["decode"])
    monkeypatch.setattr(decode.st, "from_pretrained", None)
    with pytest.raises(SystemExit):
        decode.main()
    assert "the plot needs matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_benchmark_that_writes_results_has_the_options():
    """`read_options` of `common` is the one place that chooses the directory."""
    for file in Path(common.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if file.name != "common.py" and ("write_json(" in text or " save(" in text):
            assert "read_options" in text or file.name in ("report.py", "runner.py"), file
        assert "RESULTS" not in text or file.name == "common.py", file


@pytest.mark.slow
def test_decode(monkeypatch, tmp_path, capsys):
    """From a command to its results, at its smallest and without shared data."""
    monkeypatch.setattr("benchmarks.prompts.SHARED", tmp_path / "nowhere")
    monkeypatch.setattr(decode, "methods", lambda draft, tuned: methods(draft, None)[:3])
    monkeypatch.setattr(st.ModelConfig, "preset", lambda name: st.ModelConfig.tiny())
    arguments = ["decode", "--prompts", "1", "--tokens", "8", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", str(tmp_path)])
    decode.main()
    assert "built-in ones" in capsys.readouterr().out
    (path,) = tmp_path.glob("decode-*.json")
    assert path.with_suffix(".png").exists()
    assert json.loads(path.read_text())["prompts"] == "built-in"


def test_beams_of_as_many_nodes():
    for size, depth in ((6, 3), (13, 4), (32, 5), (3, 2)):
        topology = tuned.level_sizes(size, depth)
        assert (topology.num_nodes, topology.depth) == (size, depth)
        assert topology == topology.level_order()
        widths = np.bincount(topology.depths)[1:]
        assert widths.max() - widths.min() <= 1


def test_the_verdict_on_the_tuned_tree():
    """Over prompts: a method that is faster on some of them only is not slower or faster."""
    rows = [
        {"method": name, "seconds_by_prompt": seconds}
        for name, seconds in (
            (tuned.PLAIN, [2.0, 4.0, 6.0]),
            (tuned.TUNED, [1.0, 2.0, 3.0]),
            ("tree A", [0.5, 1.0, 1.5]),
            ("tree B", [0.5, 2.0, 4.0]),
        )
    ]
    ratios = tuned.verdict(rows)
    assert ratios[tuned.PLAIN] == {"all": 2.0, "low": 2.0, "high": 2.0}
    assert ratios["tree A"]["high"] == 0.5
    assert ratios["tree B"]["low"] < 1 < ratios["tree B"]["high"]
    # Without a tuned tree the answer is not to draft.
    assert tuned.verdict([rows[0], rows[2]])["tree A"]["all"] == 0.25


@pytest.mark.slow
def test_tuned(monkeypatch, tmp_path, capsys):
    """At its smallest: few methods, and a tuned tree that is given."""
    monkeypatch.setattr("benchmarks.prompts.SHARED", tmp_path / "nowhere")
    monkeypatch.setattr(tuned, "TUNING_PROMPTS", 2)
    monkeypatch.setattr(tuned, "MAX_DEPTH", 2)
    of_all = tuned.against_the_tuned_tree
    monkeypatch.setattr(tuned, "against_the_tuned_tree", lambda *pair: of_all(*pair)[:3])
    tree = st.TreeTopology.from_parents([-1, 0, 0])
    monkeypatch.setattr(tuned.Models, "tuned", lambda *_: (tree, "given"))
    arguments = ["--prompts", "1", "--tokens", "8", "--rounds", "1", "--nodes", "3"]
    tuned.main([*arguments, "--output", str(tmp_path)])
    output = capsys.readouterr().out
    assert "temperature 1: the tuned tree (given) is" in output
    (path,) = tmp_path.glob("tuned-*.json")
    assert path.with_suffix(".png").exists()
    result = json.loads(path.read_text())
    assert [row["parents"] for row in result["tuned"]] == [[-1, 0, 0]] * 2
    assert {row["method"] for row in result["decoding_of_equal_size"]} == {
        *(f"{kind}, 3 nodes" for kind in ("static", "dynamic", "beam")),
        tuned.PLAIN,
    }


def test_a_machine_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert common.machine()["commit"] is None


ENTRY_POINTS = (
    "attention_share",
    "batch",
    "decode",
    "gpu_session",
    "hierarchical",
    "lossless",
    "medusa",
    "packed",
    "peer",
    "pictures",
    "seed",
    "serving",
    "spills",
    "static",
    "temperature",
    "tree_size",
    "tune",
    "tuned",
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


@pytest.mark.slow
def test_serving():
    tiny = st.ModelConfig.tiny(num_layers=1, tie_embeddings=False)
    pair = random_pair(tiny, tiny, "float32", 5, "tiny")
    requests = serving.requests_of(pair, 5, limits=(2, 9))
    rows = serving.measure(pair, requests, rows=2, rounds=2, drafts=True)
    assert [row["way"] for row in rows] == [serving.SCHEDULER, serving.BATCHES, serving.SORTED]
    assert [row["same_tokens"] for row in rows] == [5, 5, 5]
    assert rows[1]["speed_up"]["median"] == 1
    json.dumps(rows)


def test_the_formulas_of_hierarchical_decoding():
    for a, b, m, n in ((0.8, 0.6, 4, 2), (0.5, 0.5, 1, 4), (0.9, 0.3, 2, 0), (1.0, 1.0, 3, 2)):
        odds = ([b] * n + [a]) * m
        want = hierarchical.expected_of_order(odds)
        np.testing.assert_allclose(hierarchical.expected_tokens(a, b, m, n), want, rtol=1e-12)
        got = hierarchical.simulated(odds, 20_000, np.random.default_rng(0))
        np.testing.assert_allclose(got, want, rtol=0.05)
    better_first = hierarchical.expected_of_order([0.8] * 4 + [0.6] * 8)
    assert better_first > hierarchical.expected_tokens(0.8, 0.6, 4, 2) + 1


@pytest.mark.parametrize("pattern", ["sq", "ssq", "qs"])
def test_algorithm_2_is_exact_with_the_right_residual_only(pattern):
    found = hierarchical.distances(pattern, 2)
    assert found["printed"] > 0.3
    assert 0.02 < found["indexed"] < 0.3
    assert found["residual"] < 1e-12
    target, medium, _ = hierarchical.random_laws(0)
    joint = hierarchical.algorithm_2(target, [medium] * 2, "printed")
    np.testing.assert_allclose(joint.sum(), 1.0)


@pytest.mark.slow
def test_hierarchical(tmp_path):
    draft = str(st.demo_path("draft"))
    options = f"--small {draft} --prompts 2 --tokens 8 --rounds 1 --most 1 --trials 1000 --seeds 1"
    hierarchical.main([*options.split(), "--temperatures", "0", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("hierarchical-*.json")
    found = json.loads(path.read_text())
    assert {row["method"] for row in found["decoding"]} > {"cascade of q and s"}
    assert found["lengths"][0]["measured"] >= 1


def test_the_tree_of_the_best_ranks():
    accept = np.array([[0.5, 0.3, 0.1], [0.6, 0.2, 0.0]])
    # 0: .5, 1: .3, 0 0: .3, 1 0: .18, then 2 and 0 1, both .1
    assert medusa.best_tree(accept, 5).parents == (-1, 0, 0, 1, 2)
    assert medusa.best_tree(accept, 6).parents == (-1, 0, 0, 0, 1, 2)


def test_typical_acceptance_is_far_from_the_target():
    assert 0.3 < medusa.typical_distance(4)["largest"] <= 1


@pytest.mark.slow
def test_medusa(tmp_path):
    target = st.from_pretrained(st.demo_path("target"))
    heads = st.MedusaHeads(target, num_heads=2, rngs=nnx.Rngs(0))
    st.save_medusa(heads, target, tmp_path / "heads")
    options = f"--heads {tmp_path / 'heads'} --prompts 2 --tokens 8 --rounds 1 --nodes 4"
    medusa.main([*options.split(), "--temperatures", "1", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("medusa-*.json")
    found = json.loads(path.read_text())
    assert len(found["decoding"]) == 7
    assert found["lossy_typical"][0]["tau"] >= 1


@pytest.mark.parametrize(
    ("rounds", "draft", "verify", "want"),
    [
        ([], 1, 1, 0),
        ([3], 1, 2, 9),  # one branch: nothing overlaps
        ([1, 1], 1, 2, 5),  # both draft at once, the second waits for the first
        ([2, 1], 1, 2, 7),  # the first drafts again while the second is verified
        ([2, 2], 5, 1, 13),  # drafts hide the verifications of the other
        ([0, 2], 1, 1, 4),
    ],
)
def test_the_queue_of_seed(rounds, draft, verify, want):
    assert seed.queue_makespan(rounds, draft, verify) == want


def test_the_queue_of_seed_is_bounded():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rounds = rng.integers(1, 20, size=int(rng.integers(1, 9))).tolist()
        draft, verify = rng.uniform(0.01, 2, size=2)
        serial = sum(rounds) * (draft + verify)
        made = seed.queue_makespan(rounds, draft, verify)
        assert serial / made <= min(len(rounds), 1 + draft / verify) + 1e-9
        assert made >= max(rounds) * (draft + verify) - 1e-9


@pytest.mark.slow
def test_seed(tmp_path, capsys):
    seed.main(
        [
            *("--tasks", "gsm8k", "--problems", "1", "--rounds", "1", "--rows", "4"),
            *("--output", str(tmp_path)),
        ]
    )
    line = json.loads(capsys.readouterr().out.splitlines()[-1])["seed"]
    assert line["same_thoughts"]
    results = json.loads((tmp_path / "seed-cpu.json").read_text())
    by_way = {row["way"]: row for row in results["ways"]}
    assert by_way[seed.QUEUE]["simulated"]
    assert sum(row["simulated"] for row in results["ways"]) == 1
    assert (tmp_path / "seed-cpu.png").is_file()
