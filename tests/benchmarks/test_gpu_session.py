"""The parts of the GPU session on tiny shapes: time on a GPU is too scarce to find typos."""

import json
import re
from inspect import isroutine, signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from benchmarks import gpu_session, lossless
from benchmarks.cases import CASES, checks, moe, tree_attention
from benchmarks.cases.base import Problem
from benchmarks.gpu import checks as gpu_checks
from benchmarks.gpu import report
from benchmarks.gpu.scale import FULL, SMOKE
from benchmarks.gpu.tasks import Section
from benchmarks.shapes import AttentionShape
from tests.benchmarks.fake_sections import done

NORM = "gated_rms_norm"


def rows_of(tasks):
    """The rows that the process of a section would write."""
    code, rows, _ = done(Section(lambda options, rows: tasks, 1.0))
    assert (code, [row["task"] for row in rows]) == (0, [task.name for task in tasks])
    return json.loads(json.dumps(rows, allow_nan=False))


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    gpu_session.main(["--output", str(tmp_path)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["gpu_session"]["right"] is None
    assert list(tmp_path.iterdir()) == []


def test_the_full_session_has_all_kernels():
    functions = {name: function for name, function in vars(pk).items() if isroutine(function)}
    ops = {n for n, f in functions.items() if "implementation" in signature(f).parameters}
    ops -= {"matmul", "rms_norm", "largest_threshold"}  # no kernel of a GPU
    ops -= {"tree_delta", "replay_delta", "replay_tree_delta", "delta_chunks"}  # none yet
    assert set(CASES) == {*ops, tree_attention.PROMPT, moe.PROMPT}
    assert {task.name for task in gpu_checks.gate(FULL)} == set(CASES) == set(FULL.cases)
    # A body of a loop with fewer than 5 launches is no CUDA graph.
    assert (FULL.count - 1) % checks.UNROLLED == 0
    # On a GPU no family may fall back to XLA for its shapes.
    for config in lossless.FAMILIES.values():
        for mixer in filter(None, (config.mamba2, config.attention)):
            sizes = [mixer.head_dim, getattr(mixer, "state_size", 16)]
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)


@pytest.mark.slow
def test_all_kernels_are_checked():
    every = SMOKE._replace(cases=tuple(CASES), checked_dtypes=("bfloat16", "float32"))
    rows = rows_of(gpu_checks.correctness(every))
    assert [row for row in rows if not row["right"]] == []
    assert [*map(len, (row["errors"] for row in rows))] == [2] * 2 * len(CASES)


@pytest.mark.parametrize("fault", [None, "race", "infinite"])
def test_the_gate_finds(fault, monkeypatch):
    """A kernel that gives another bit in one call of many, or that is off."""
    case, calls = CASES[NORM], []

    def function(y, *rest, implementation):
        value = case.function(y, *rest)
        if implementation == "xla" or fault is None:
            return value
        if fault == "infinite":
            return value * jnp.inf
        called = jax.pure_callback(lambda: np.int32(calls.append(1) or len(calls)), jnp.int32(0))
        return jnp.where(called == 4, value.at[0, 0, 0].add(1 / 64), value)

    monkeypatch.setitem(CASES, NORM, case._replace(function=function))
    (row,) = rows_of([task for task in gpu_checks.gate(SMOKE) if task.name == NORM])
    assert (row["changed"], row["right"]) == (fault == "race", fault is None)
    assert (row["errors"]["pallas_interpret"] == ["not finite"]) == (fault == "infinite")


def test_wrong_and_broken_kernels_are_found(monkeypatch):
    """A kernel that does not run does not hide the others."""
    case = CASES[NORM]

    def function(y, *rest, implementation):
        if implementation == "pallas_interpret":
            raise ValueError("no such device")
        return 1.001 * case.function(y, *rest)

    monkeypatch.setitem(CASES, NORM, case._replace(function=function))
    (row,) = rows_of(gpu_checks.correctness(SMOKE._replace(cases=(NORM,))))
    assert row["errors"]["pallas_interpret"] == "failed: no such device"
    assert row["errors"]["xla"] == pytest.approx([1e-3], rel=0.01)
    assert not report.is_right(results_of(correctness=[row]))


def test_an_attention_moves_only_what_is_filled():
    shape = SMOKE.shapes[AttentionShape]["tiny"]
    problem = Problem(shape, 3, "float32", batch=2, capacity=30)
    case = CASES["tree_attention"]
    operands = case.operands(problem)
    sizes = [value.nbytes for value in (*operands, operands[0])]
    place = shape.num_kv_heads * shape.head_dim * 4
    assert checks.bytes_moved(case, operands) == sum(sizes) - 2 * 20 * place


def test_repeated_calls_follow_each_other():
    for count in (2, 17, 20):
        add = checks.repeated(lambda x, y: (x, y + x), {1: 1}, count)
        (x, y), _ = jax.jit(add)(jnp.float32(2), jnp.float32(1))
        assert (x, y) == (2, 1 + 2 * count)


def test_xla_computes_outputs_that_no_call_reads():
    """On a CPU XLA sees through the barrier, so calls without feedback cannot be counted here."""
    x = jnp.ones((64, 64))
    program = checks.compiled_calls(lambda x: (x @ x, jnp.tanh(x)), {0: 0}, 17, (x,))
    assert program.as_text().count(" tanh(") == 1 + 8  # of all calls but the last


def results_of(**sections):
    notes = {name: {"state": "done", "rows": rows} for name, rows in sections.items()}
    return {"machine": {"device": "a device"}, "sections": notes}


def test_the_report(capsys):
    def row(ours, **more):
        times = {"xla": {"median": 2.0}, "pallas": {"median": ours}}
        unit = "microseconds" if "kernel" in more else "milliseconds"
        return {"task": "1", "batch": 1, "bytes": 500_000, "nodes": 3, unit: times} | more

    crashed = {"task": "ssd, mamba2-2.7b, 64, bfloat16", "failed": "the process ended with -9"}
    results = results_of(
        gate=[{"task": "replay", "kernel": "replay", "right": False}],
        correctness=[crashed],  # so the kernel counts as wrong
        bandwidth=[{"task": "copy", "bytes_per_second": 1e9}],
        kernels=[row(1.0, kernel=name, shape="s") for name in ("replay", "ssd", "tree_scan")],
        steps=[row(1.0)],
    )
    results["sections"]["kernels"]["left_out"] = ["64 nodes"]
    report.annotate(results)
    report.annotate(results)  # after every row
    rows = [row for name in ("kernels", "steps") for row in results["sections"][name]["rows"]]
    assert [row["wrong"] for row in rows] == ["replay", "ssd", "", "replay, ssd"]
    first, *_, step = rows
    assert (first["floor_microseconds"], first["xla_over_kernel"]) == (500, 2)
    assert (step["floor_milliseconds"], step["kernel_over_floor"]) == (0.5, 2)
    assert not report.is_right(results)
    assert report.left_out(results) == 1
    report.report(results)
    out = capsys.readouterr().out
    assert "kernels left out: 64 nodes" in out
    assert re.search(r"replay +│ s +│ +3 .*│ replay", out)
