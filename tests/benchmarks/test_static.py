"""What `benchmarks.static` counts, and its limits."""

import functools
import importlib.util
import math
import subprocess
import sys

import pytest

import stree_jax
from benchmarks.static import gates, thunks
from benchmarks.static.collectives import Found, collectives, problems
from benchmarks.static.cost import kernel_bytes

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


HLO = """\
ENTRY %main.1 (a.1: f32[64,2], w.1: bf16[2]) -> (f32[64,2], pred[3]) {
  %w.1 = bf16[2]{0} parameter(1), sharding={mesh['x'=1], [{}]}
  %a.1 = f32[64,2]{1,0} parameter(0)
  %gemm-2 = f32[64,2]{1,0} custom-call(%a.1, %w.1), custom_call_target="__cublas$gemm"
  ROOT %call.3 = (f32[64,2]{1,0}, /*index=1*/pred[3]{0}) custom-call(%gemm-2, %w.1, %n.1), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="x"}
  %n.1 = s32[] constant(1)
  %q.1 = f32[3,8]{1,0} parameter(2)
  %q.2 = (f32[3,8]{1,0}, f32[8,3]{1,0}) custom-call(%q.1), custom_call_target="__gpu$xla.gpu.triton"
"""


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
    config = stree_jax.ModelConfig.tiny()  # two layers of width 16, 37 words
    good = [Found("all-reduce", "body", 442)] * 4 + [Found("all-gather", "body", 2 * 13 * 37)]

    def of(*found):
        return problems(config, found, steps=1, nodes=13, rows=2)

    assert of(*good) == []
    assert "body has" in of(*good, good[0])[0]
    assert "condition has a collective" in of(*good, Found("all-reduce", "condition", 1))[0]
    assert "collective-permute of 4" in of(*good, Found("collective-permute", "outside", 4))[0]
    assert "a weight or a state" in of(*good[1:], Found("all-reduce", "body", 445))[0]


def test_bytes_of_our_kernels_are_counted():
    assert kernel_bytes(HLO) == [512 + 3 + 512 + 4 + 4, 96 + 96 + 96]


def row(nodes=64, *, all_bytes=1, **launches):
    """A row of results."""
    layers = {kind: {"launches": count} for kind, count in launches.items()}
    program = {"preset": "p", "gpu": "g", "implementation": "pallas", "products": "whole"}
    return program | {"nodes": nodes, "layers": layers, "whole": {"all_bytes": all_bytes}}


def test_limits_of_launches():
    rows = [
        row(mamba2=5.0, mlp=4.0),
        row(16, mamba2=4.5),
        row(1, mamba2=6.0, mlp=5.0),
        row(mamba2=20.0) | {"implementation": "xla"},
        row(mamba2=30.0) | {"products": "split"},
    ]
    check = functools.partial(gates.failures, rows, growth=math.inf, spilled=0)
    assert check(launches=[("mamba2", 5), ("mlp", 4)]) == []
    (failure,) = check(launches=[("mamba2", 4), ("mlp", 4)])
    assert failure.startswith("mamba2: 5.0 launches, the limit is 4;")
    (failure,) = check(launches=[gates.limit("attention=5")])
    assert failure.startswith(
        "attention: nothing of this kind was compiled; launches, the limit is 5;"
    )
    prompt = row(mamba2=11.0)
    prompt["positions"] = prompt.pop("nodes")
    assert gates.most_launches([prompt]) == {"prompt-mamba2": 11.0}


def test_limits_of_launches_outside_of_layers():
    program = {"implementation": "pallas", "products": "whole"}
    rows = [
        program | {"sampled": False, "launches_a_step": 29.5},
        program | {"sampled": True, "launches_a_step": 35.0},
        program | {"sampled": True, "launches_a_step": 99.0, "products": "split"},
    ]
    assert gates.most_outside(rows) == {"greedy": 29.5, "sampled": 35.0}
    limits = [("greedy", 30), ("sampled", 34)]
    (failure,) = gates.exceeded(gates.most_outside(rows), limits)
    assert failure.startswith("sampled: 35.0 launches, the limit is 34;")
    (failure,) = gates.exceeded(gates.most_outside(rows[:1]), limits)
    assert failure.startswith("sampled: nothing of this kind was compiled;")


def test_limits_of_memory_and_spills():
    rows = [row(1, all_bytes=1000), row(64, all_bytes=1041), row(16, all_bytes=1100)]
    check = functools.partial(gates.failures, launches=(), spilled=0)
    assert gates.growth_of_memory(rows) == {"p, g": pytest.approx(4.1)}
    assert check(rows, growth=4.2) == []
    assert check(rows, growth=4.0) == ["p, g: memory grows by 4.10 %, the limit is 4 %"]
    assert check(rows[:1], growth=math.inf) == []
    (failure,) = check(rows[:1], growth=4.0)
    assert "no whole model was compiled for two sizes" in failure
    assert gates.failures(rows, launches=(), growth=5.0, spilled=2) == [
        "2 programs spill registers"
    ]


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
