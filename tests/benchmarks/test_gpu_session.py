"""The parts of the GPU session on tiny shapes: time on a GPU is too scarce to find typos."""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import time
from inspect import isroutine, signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
import stree_jax as st
from benchmarks import lossless
from benchmarks.cases import CASES, checks, moe, tree_attention
from benchmarks.cases.base import Problem
from benchmarks.gpu import byte_pair, kernels, models, session, transformers_step
from benchmarks.gpu.scale import FULL, SMOKE
from benchmarks.gpu.sections import Clock, Section, run_sections
from benchmarks.gpu.spaces import SPACES
from benchmarks.models import random_pair
from benchmarks.paper import batch, packed
from benchmarks.shapes import AttentionShape, MixerShape
from pallas_kernels import tuning
from stree_jax.training.recipe import Training

TINY = st.ModelConfig.tiny(vocab_size=256, num_layers=1)


@pytest.fixture
def clock():
    return Clock(math.inf)


def test_it_says_that_there_is_no_gpu():
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_session"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert "no GPU here" in result.stdout


def test_sections_share_the_time_and_say_what_they_left_out(capsys):
    allowed = {}

    def measure(name, clock):
        allowed[name] = clock
        return [i for i in range(3) if clock.fits(f"item {i}")]

    def fail(_):
        raise RuntimeError("no memory")

    def slow(clock):
        time.sleep(0.3)
        return measure("slow", clock)

    sections = [
        Section("first", 1, functools.partial(measure, "first")),
        Section("failing", 1, fail),
        Section("slow", 1, slow),
        Section("last", 1, functools.partial(measure, "last")),
    ]
    results, saved = {}, []
    run_sections(sections, 0.2, results, lambda: saved.append(json.dumps(results)))
    assert results["first"] == [0, 1, 2]
    assert "failing" not in results
    assert results["sections"]["failing"]["failed"] == "RuntimeError: no memory"
    assert results["slow"] == []
    assert results["sections"]["slow"]["left_out"] == ["item 0", "item 1", "item 2"]
    assert results["sections"]["last"]["left_out"] == ["all of it"]
    assert len(saved) == 4
    assert not session.is_right(results)


def test_the_timed_and_the_tuned_kernels_are_all():
    functions = {name: function for name, function in vars(pk).items() if isroutine(function)}
    ops = {n for n, f in functions.items() if "implementation" in signature(f).parameters}
    timed = {name for name, case in CASES.items() if case.timed}
    assert timed == {*ops, tree_attention.PROMPT, moe.PROMPT}
    assert set(SPACES) == set(tuning.OPS)
    assert {space.timed for space in SPACES.values()} <= timed


@pytest.mark.slow
def test_all_kernels_are_checked(clock):
    result = kernels.check_kernels(SMOKE, clock)
    assert [row for row in result["rows"] if not row["right"]] == []
    assert result["right"]
    assert len(result["rows"]) == 2 * len(CASES)
    assert all(set(row["errors"]) == set(SMOKE.implementations) for row in result["rows"])
    json.dumps(result)
    late = kernels.check_kernels(SMOKE, out := Clock(-1.0))
    assert late == {"right": False, "rows": []}
    assert len(out.left_out) == 2 * len(CASES)
    assert out.left_out[0] == "tree_scan, tiny, 5, bfloat16"


def test_what_is_wrong_is_seen():
    problem = Problem(SMOKE.shapes[MixerShape]["tiny"], 3, "float32", batch=2)
    case = CASES["gated_rms_norm"]

    def broken(y, *rest, implementation):
        if implementation == "pallas":
            raise ValueError("no such device")
        return 1.001 * case.function(y, *rest)

    found = checks.errors(case._replace(function=broken), problem, ("xla", "pallas"))
    assert found["xla"] == pytest.approx([1e-3], rel=0.01)
    assert found["pallas"] == "failed: no such device"
    assert not any(checks.within_limits(case, "float32", error) for error in found.values())


def test_an_attention_moves_only_what_is_filled():
    shape = SMOKE.shapes[AttentionShape]["tiny"]
    problem = Problem(shape, 3, "float32", batch=2, capacity=30)
    case = CASES["tree_attention"]
    operands = case.operands(problem)
    sizes = [value.nbytes for value in (*operands, operands[0])]
    place = shape.num_kv_heads * shape.head_dim * 4
    assert checks.bytes_moved(case, operands) == sum(sizes) - 2 * 20 * place

    # Three nodes fewer each; keys and values are results, too, but only the path of them is new.
    case = CASES["tree_attention_layer"]
    operands = case.operands(problem)
    _, *results, _, _ = jax.eval_shape(
        functools.partial(case.function, implementation="xla"), *operands
    )
    sizes = [value.nbytes for value in operands]
    sizes += [value.size * 4 for value in results] + [3 * 2 * shape.num_heads * shape.head_dim * 4]
    unfilled = 60 - (27 + 7)
    assert checks.bytes_moved(case, operands) == sum(sizes) - 2 * unfilled * place


def test_repeated_calls_follow_each_other():
    add = checks.repeated(lambda x, y: (x, y + x), {1: 1}, 5)
    x, y = jax.jit(add)(jnp.float32(2), jnp.float32(1))
    assert (x, y) == (2, 11)


@pytest.mark.slow
def test_kernels_are_timed(monkeypatch, clock):
    some = {name: CASES[name] for name in ("replay", "gated_rms_norm")}
    monkeypatch.setattr(kernels, "CASES", some)
    rows = kernels.time_kernels(SMOKE, 1e9, clock)
    assert [row["kernel"] for row in rows] == ["replay", "gated_rms_norm"]
    for row in rows:
        assert row["floor_microseconds"] == pytest.approx(row["bytes"] / 1e3)
        assert row["kernel_over_floor"] > 0
    json.dumps(rows)


@pytest.mark.slow
def test_steps_are_timed(clock):
    few = dataclasses.replace(SMOKE, implementations=("xla",))
    result = models.measure_steps(few, few.mamba2, 1e12, clock)
    assert [row["nodes"] for row in result["steps"]] == [1, 5, 7]
    assert result["fits"]["nodes"] == [1, 5, 7]
    assert result["7_nodes_over_one"] > 0
    mixer = few.mamba2.mamba2
    size = mixer.num_heads * mixer.head_dim
    conv = 3 * (size + 2 * mixer.state_size)
    assert result["state_bytes"] == size * mixer.state_size * 4 + conv * 2
    json.dumps(result)


def test_families_fit_the_kernels():
    """On a GPU none of them may fall back to XLA for its shapes."""
    for config in lossless.FAMILIES.values():
        for mixer in (config.mamba2, config.attention):
            sizes = [] if mixer is None else [mixer.head_dim, getattr(mixer, "state_size", 16)]
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    assert set(FULL.families) == set(lossless.FAMILIES)
    assert set(FULL.trees) <= set(lossless.TREES)


@pytest.mark.slow
def test_losslessness_is_checked_with_the_kernels_first(monkeypatch, clock):
    calls = []

    def check(config, implementation, trees, *, tokens):
        calls.append((implementation, *trees))
        return {name: {"identical": implementation == "pallas"} for name in trees}

    monkeypatch.setattr(lossless, "check", check)
    two = dataclasses.replace(FULL, families=("Mamba-2", "Bamba"), trees=("tree A",))
    result = models.check_lossless(two, clock)
    assert [row["implementation"] for row in result["rows"]] == ["pallas"] * 2 + ["xla"] * 2
    assert not result["identical"]
    assert len(calls) == 4


def test_packed_asks_whether_there_is_time():
    pair = random_pair(TINY, TINY, "float32", 1, "tiny")
    rows = packed.measure(
        pair, beams=(2,), steps=(2,), tokens=2, rounds=1, fits=(out := Clock(-1.0)).fits
    )
    assert rows == []
    assert out.left_out == ["2 beams of 2"]


def test_without_torch_transformers_is_left_out(monkeypatch, clock):
    monkeypatch.setattr(transformers_step, "obstacle", lambda device: f"no {device}")
    assert models.measure_transformers(SMOKE, clock) is None
    assert clock.left_out == ["all of it: no cpu"]


@pytest.mark.slow
def test_transformers(clock):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = transformers_step.measure(
        SMOKE.mamba2, device="cpu", dtype="bfloat16", tokens=2, rounds=2
    )
    assert result["tokens"] == 2
    json.dumps(result)


@pytest.mark.slow
def test_a_pair_is_trained_for_some_time(monkeypatch, tmp_path, clock):
    (tmp_path / "text").mkdir()
    monkeypatch.setattr(byte_pair, "SHARED", tmp_path)
    monkeypatch.setattr(byte_pair, "TEXTS", {"a.txt": 1.0})
    with pytest.raises(SystemExit, match=r"nothing to train on: .*a\.txt"):
        byte_pair.text_directory()
    (tmp_path / "text" / "a.txt").write_text("ab" * 1000)
    training = Training(
        steps=10**9, batch_size=2, sequence_length=8, learning_rate=3e-2, warmup_steps=1
    )
    trained = byte_pair.train(1.5, target=TINY, draft=TINY, training=training, num_prompts=2)
    report = trained.report
    assert report["target"]["held_out_nats"] < 0.7 * math.log(256)
    assert report["draft"]["steps"] >= 2
    assert trained.pair.trained
    assert all(max(prompt) < 256 for prompt in trained.pair.prompts)
    assert trained.as_type("bfloat16").draft.dtype == jnp.bfloat16

    calls = []

    def measure(pair, **options):
        calls.append((pair.target.dtype.name, options["batches"]))
        return [{"same_tokens": pair.target.dtype == jnp.float32}]

    monkeypatch.setattr(batch, "measure", measure)
    result = models.end_to_end(SMOKE, trained, clock)
    assert result["same_tokens_in_float32"]
    assert calls == [(d, (n,)) for d in ("float32", "bfloat16") for n in (1, 2)]
    json.dumps(report)


@pytest.mark.slow
def test_the_whole_command_on_a_section(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "CASES", {"gated_rms_norm": CASES["gated_rms_norm"]})
    arguments = ["--smoke", "--output", str(tmp_path), "--sections", "kernels", "transformers"]
    monkeypatch.setattr(transformers_step, "obstacle", lambda device: "not here")
    session.main(arguments)  # raises SystemExit if anything is wrong
    lines = capsys.readouterr().out.splitlines()
    line = json.loads(lines[-1])["gpu_session"]
    assert line["right"]
    assert line["left_out"] == 1
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert list(results["sections"]) == ["bandwidth", "kernels", "transformers"]
    assert results["versions"]["jax"] == jax.__version__
    assert results["kernels"][0]["floor_microseconds"] > 0
    assert (tmp_path / "cpu.png").exists() or any("no plot" in line for line in lines)


def test_training_takes_some_of_the_time(capsys):
    with pytest.raises(SystemExit):
        session.main(["--smoke", "--train", "9"])
    assert "--train 9 is not within --minutes 9" in capsys.readouterr().err


def test_report_and_plot(tmp_path, capsys):
    times = {"xla": {"median": 2.0}, "pallas": {"median": 1.0}}
    kernel = {"kernel": "replay", "shape": "s", "nodes": 3, "batch": 64, "microseconds": times}
    steps = {"floor_milliseconds": 0.5, "steps": [{"nodes": 1, "milliseconds": times}]}
    results = {
        "machine": {"device": "a device"},
        "kernels": [kernel | {"floor_microseconds": 0.5, "kernel_over_floor": 2.0}],
        "mamba2 steps": steps | {"one_node_over_floor": 2.0},
        "packed": {"rows": [{"nodes": 63, "packed_is_faster_by": 2.5}]},
        "sections": {"kernels": {"allowed_seconds": 1.0, "left_out": ["64 nodes"]}},
    }
    session.report(results)
    assert "kernels left out: 64 nodes" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    session.plot(results, tmp_path / "a.png")
    met = {name: aim["met"] for name, aim in session.aims(results).items()}
    assert met == {"one node of mamba2-2.7b over the floor": False, "unrolled over packed": True}
    assert session.aims({"packed": None}) == {}


def test_names_of_sections_are_those_that_there_are():
    trained = byte_pair.Trained(random_pair(TINY, TINY, "float32", 1, "tiny"), {})
    names = [section.name for section in session.sections_of(SMOKE, {}, trained)]
    assert tuple(names) == session.NAMES
    assert np.all([section.weight > 0 for section in session.sections_of(SMOKE, {})])
