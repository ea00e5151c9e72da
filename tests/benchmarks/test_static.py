"""The counts of `benchmarks.static`, its limits and its tables."""

import importlib.util
import json
import math
import re
import subprocess
import sys

import pytest

import stree_jax
from benchmarks.static import gates, report, thunks
from benchmarks.static.collectives import Found, collectives, problems

THUNKS = """\
000: kCopy         [source | next=002 (1)] kCopy
001: kKernel       [source | next=002 (1)] wrapped_add grid: [1, 1, 1]
002: kWhile        [prev=000 (1) | sink]
condition:
    003: kKernel   [source | sink] compare
  body:
    004: kKernel   [source | next=005 (1)] replay_3 grid: [1] shared_memory: 512 bytes
    005: kGemm     [prev=004 (1) | sink] custom-call
    006: kMemzero  [source | sink] kMemzero
    007: kAsyncStart [source | next=010 (1)] stream=computation_stream[0], async_id=7
        009: kDynamicSliceFusion [source | sink] params=1, results=1
            008: kCopy [source | sink] kCopy
    010: kAsyncDone  [source | sink] async_id=7
011: kKernel       [prev=002 (1) | sink] fusion
"""


def test_what_xla_launches_is_counted():
    found = thunks.Thunks.parse(THUNKS)
    assert [thunk.kind for thunk in found.outside] == ["kCopy", "kKernel", "kWhile", "kKernel"]
    assert found.inside[0] == ("kKernel", "replay", 512)
    assert thunks.num_loops(found.outside) == 1
    assert thunks.by_name(found.outside) == {"kCopy": 1, "wrapped_add": 1, "fusion": 1}
    put = [thunk.kind for thunk in thunks.work(found.inside)]
    assert put == ["kKernel", "kGemm", "kMemzero", "kCopy"]
    assert thunks.launches(found.outside) == (3, 1)
    assert thunks.launches(found.inside) == (4, 2)


def test_collectives_are_found_where_they_are():
    def line(left, scope):
        return f'  %x.1 = {left}(%y.1), channel_id=1, metadata={{op_name="jit(run)/{scope}/psum"}}'

    text = "\n".join(
        [
            line("f32[2,13,17]{2,1,0} all-reduce", "while/body/layer_0"),
            line("(f32[2,3]{1,0}, f32[2,12]{1,0}) all-gather-start", "while/body/head"),
            line("pred[] all-reduce", "while/cond"),
            line("f32[4]{0} collective-permute", "layer_0"),
            "  %x.2 = f32[4]{0} all-reduce-done(%x.1)",
        ]
    )
    assert collectives(text) == [
        Found("all-reduce", "body", 442),
        Found("all-gather", "body", 24),
        Found("all-reduce", "condition", 1),
        Found("collective-permute", "outside", 4),
    ]


def test_what_a_loop_on_a_mesh_may_exchange():
    config = stree_jax.ModelConfig.tiny()  # two layers of width 16, 37 tokens
    good = [Found("all-reduce", "body", 442)] * 4 + [Found("all-gather", "body", 2 * 13 * 37)]

    def of(*found):
        return problems(config, found, steps=1, nodes=13, rows=2)

    assert of(*good) == []
    assert "body has" in of(*good, good[0])[0]
    assert "condition has a collective" in of(*good, Found("all-reduce", "condition", 1))[0]
    assert "collective-permute of 4" in of(*good, Found("collective-permute", "outside", 4))[0]
    assert "a weight or a state" in of(*good[1:], Found("all-reduce", "body", 445))[0]


PROGRAM = {"preset": "p", "gpu": "g", "implementation": "pallas", "products": "whole"}


def row(nodes=64, *, all_bytes=1, **launches):
    """A row of results."""
    layers = {kind: {"launches": count} for kind, count in launches.items()}
    return PROGRAM | {"nodes": nodes, "layers": layers, "whole": {"all_bytes": all_bytes}}


def test_launches_are_those_of_our_kernels_with_products_whole():
    rows = [
        row(mamba2=5.0, mlp=4.0),
        row(16, mamba2=4.5),
        row(1, mamba2=6.0, mlp=5.0),
        row(mamba2=20.0) | {"implementation": "xla"},
        row(mamba2=30.0) | {"products": "split"},
        PROGRAM | {"positions": 512, "layers": {"mamba2": {"launches": 11.0}}},
    ]
    assert gates.most_launches(rows) == {"mamba2": 5.0, "mlp": 4.0, "prompt-mamba2": 11.0}
    rows = [
        PROGRAM | {"sampled": False, "launches_a_step": 29.5},
        PROGRAM | {"sampled": True, "launches_a_step": 35.0},
        PROGRAM | {"sampled": True, "launches_a_step": 99.0, "products": "split"},
    ]
    assert gates.most_outside(rows) == {"greedy": 29.5, "sampled": 35.0}


def test_limits():
    rows = [row(1, all_bytes=1000), row(64, all_bytes=1041), row(16, all_bytes=1100)]
    growth = gates.growth_of_memory(rows)
    assert growth == {"p, g": pytest.approx(4.1)}
    assert gates.growth_of_memory(rows[:1]) == {}
    most = {"mamba2": 5.0, "mlp": 4.0}

    def failures(*limits, growth=growth, most_growth=math.inf, spilled=0):
        return gates.failures(most, map(gates.limit, limits), growth, most_growth, spilled)

    assert failures("mamba2=5", "mlp=4", most_growth=4.2) == []
    (failure,) = failures("mamba2=4", "mlp=4")
    assert failure.startswith("mamba2: 5.0 launches, the limit is 4;")
    (failure,) = failures("sampled=34")
    assert failure.startswith(
        "sampled: nothing of this kind was compiled; launches, the limit is 34;"
    )
    assert failures(most_growth=4.0) == ["p, g: memory grows by 4.10 %, the limit is 4 %"]
    (failure,) = failures(most_growth=4.0, growth={})
    assert "no whole model was compiled for two sizes" in failure
    assert failures(spilled=2) == ["2 programs spill registers"]


def test_earlier_rows_with_the_same_settings_stay(tmp_path, capsys):
    """And the tables have a line for each row."""
    cost = dict(launches=5.0, copies=0.0)
    step = row() | {"spills": False, "shared_memory_bytes": 2048, "step": cost}
    step |= {"layers": {"mamba2": cost}, "whole": dict(all_bytes=3, temporary_bytes=1)}
    report.write("?", {"batch": 1}, {"steps": [step, step | {"preset": "q"}]}, tmp_path)
    path = report.write("?", {"batch": 1}, {"steps": [step | {"nodes": 1}, step]}, tmp_path)
    stored = json.loads(path.read_text())["steps"]
    assert [(row["preset"], row["nodes"]) for row in stored] == [("q", 64), ("p", 1), ("p", 64)]
    report.write("?", {"batch": 2}, {"steps": [step]}, tmp_path)
    assert len(json.loads(path.read_text())["steps"]) == 1
    report.print_programs("a step", "nodes", stored)
    out = re.sub("[ \u2502]+", " ", capsys.readouterr().out)
    for end in ("64 mamba2 5 0", "1 5 0 2,048 False", "64 1 3"):
        assert f"p g pallas whole {end}" in out


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the plugin is installed"
)
def test_without_the_plugin_static_says_what_to_install():
    """In a process of its own, since it changes XLA's flags."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.static"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "install jax-cuda13-plugin and jax-cuda13-pjrt" in result.stderr
