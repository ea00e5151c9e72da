"""The counts of `benchmarks.static`, its limits and its results."""

import math

import pytest

import stree_jax
from benchmarks.static import gates, hlo, thunks
from benchmarks.static.collectives import Found, collectives, problems
from tests.helpers import by_message

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


CAPTURED = """\
005: kWhile [source | sink]
condition:
    006: kKernel [source | sink] compare
  body:
    000: kCommandBuffer [source | sink]
        007: kKernel [source | sink] replay
    008: kWhile [source | sink]
condition:
        009: kKernel [source | sink] compare
      body:
        000: kCommandBuffer [source | sink]
            010: kAsyncStart [source | sink]
    011: kHostSend [source | sink]
012: kWhile [source | sink]
condition:
  body:
    000: kCommandBuffer [source | sink]
"""


def test_what_the_host_launches_in_a_loop_is_found():
    loops = thunks.bodies(CAPTURED)
    assert loops == {"kCommandBuffer kWhile kHostSend": 1, "kCommandBuffer": 2}
    program = PROGRAM | {"loop_nodes": 5}
    assert gates.not_one_graph([program | {"bodies": {"kCommandBuffer": 2}}]) == []
    (problem,) = gates.not_one_graph([program | {"bodies": loops}])
    assert problem == "p, g, 5 nodes: a loop's body is kCommandBuffer kWhile kHostSend"
    (problem,) = gates.not_one_graph([program | {"bodies": {}}])
    assert problem.startswith("one graph: no loop was compiled")


HLO = """\
%fused (p.1: bf16[64,32], p.2: bf16[2,64]) -> f32[2,32] {
  %p.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = bf16[2,64]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c.1 = f32[2,32]{1,0:T(8,128)} convolution(%p.2, %p.1), dim_labels=bf_io->bf
}

%body (s.1: (s32[], f32[2,32])) -> (s32[], f32[2,32]) {
  %s.1 = (s32[]{:T(128)}, f32[2,32]{1,0:T(8,128)}) parameter(0)
  %f.1 = f32[2,32]{1,0:T(8,128)S(1)} fusion(%w, %g.1), calls=%fused, "estimated_cycles":"700"
  %d.1 = bf16[64,32]{1,0:T(8,128)S(1)} copy-done(%s.2)
  %b.1 = bf16[64,32]{1,0:S(1)} custom-call(%d.1), custom_call_target="ConcatBitcast"
  INSTRUCTION
}

%condition (s.3: (s32[], f32[2,32])) -> pred[] {
  %n.1 = pred[]{:T(512)} compare(%g.2, %k.1), direction=LT
}

ENTRY %main (w.1: bf16[64,32]) -> f32[2,32] {
  %s.2 = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]{:S(2)}) copy-start(%w.1)
  %l.1 = (s32[], f32[2,32]{1,0}) while(%t.1), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("instruction", "problem"),
    [
        ("%x = f32[2,32]{1,0} add(%f.1, %f.1)", None),
        ("%x = (f32[5000]{0}, s32[5000]{0}) sort(%a, %b), dimensions={0}", "sorts 5000 numbers"),
        ("%x = (f32[512,64]{1,0}, s32[512,64]{1,0}) sort(%a, %b), dimensions={1}", None),
        ("%x = bf16[32,64]{1,0:T(8,128)S(1)} copy(%b.1)", "writes bf16[32,64]"),
        ("%x = f32[64,32]{1,0:T(8,128)} fusion(%b.1), calls=%y", "writes f32[64,32]"),
        ("%x = (f32[2], u32[], token[]) send(%f.1), is_host_transfer=true", "transfer to the host"),
    ],
)
def test_what_a_program_for_a_tpu_must_not_do(instruction, problem):
    text = hlo.Text(HLO.replace("INSTRUCTION", instruction))
    in_body = [each.opcode for each in text.run(text.body())]
    assert in_body == ["fusion", instruction.split("(%")[0].split()[-1]]
    assert [each.opcode for each in text.run(text.entry)] == ["copy-start", "compare", *in_body]
    assert sum(each.cycles for each in text.run(text.entry)) == 700
    found = hlo.problems(text, {64 * 32})
    assert [problem in each for each in found] == ([True] if problem else [])


def test_a_weight_that_is_widened_inside_of_a_product_is_found():
    text = hlo.Text(HLO.replace("%p.1 = bf16", "%p.1 = f32"))
    assert ["weight in float32" in each for each in hlo.problems(text, {64 * 32})] == [True]


def test_collectives_are_found_where_they_are():
    def line(left, scope):
        return f'  %x.1 = {left}(%y.1), channel_id=1, metadata={{op_name="jit(run)/{scope}/psum"}}'

    lines = [
        line("f32[2,13,17]{2,1,0} all-reduce", "while/body/layer_0"),
        line("(f32[2]{0}, f32[2,12]{1,0}) all-gather-start", "while/body"),
        line("pred[] all-reduce", "while/cond"),
        line("f32[4]{0} collective-permute", "layer_0"),
        "  %x.2 = f32[4]{0} all-reduce-done(%x.1)",
    ]
    assert collectives("\n".join(lines)) == [
        ("all-reduce", "body", 442),
        ("all-gather", "body", 24),
        ("all-reduce", "condition", 1),
        ("collective-permute", "outside", 4),
    ]


@by_message(
    ("more", "message"),
    [
        (("all-reduce", "body", 442), "body has"),
        (("all-reduce", "condition", 1), "condition has a collective"),
        (("collective-permute", "outside", 4), "collective-permute of 4"),
        (("all-gather", "outside", 2 * 13 * 37 + 1), "a weight or a state"),
        (None, None),
    ],
)
def test_what_a_loop_on_a_mesh_may_exchange(more, message):
    config = stree_jax.ModelConfig.tiny()  # two layers of width 16, 37 tokens
    found = [Found("all-reduce", "body", 442)] * 4 + [Found("all-gather", "body", 2 * 13 * 37)]
    found += [Found(*more)] if more else []
    wrong = problems(config, found, steps=1, nodes=13, rows=2)
    assert [message in each for each in wrong] == ([True] if more else [])


PROGRAM = {"preset": "p", "gpu": "g", "implementation": "pallas", "products": "whole"}


def row(nodes=64, *, all_bytes=1, **launches):
    """A row of results."""
    layers = {kind: {"launches": count} for kind, count in launches.items()}
    return PROGRAM | {"nodes": nodes, "layers": layers, "whole": {"all_bytes": all_bytes}}


def test_launches_are_those_of_our_kernels_with_products_whole():
    rows = [
        row(mamba2=5.0, mlp=4.0),
        row(1, mamba2=6.0, mlp=5.0),
        row(mamba2=20.0) | {"implementation": "xla"},
        row(mamba2=30.0) | {"products": "split"},
        PROGRAM | {"positions": 512, "layers": {"mamba2": {"launches": 11.0}}},
        PROGRAM | {"draft": "d", "layers": {"mamba2": {"launches": 21.0}}},
    ]
    rows += [PROGRAM | {"sampled": n > 1, "launches_a_step": 29.5 + n} for n in range(4)]
    most = {"mamba2": 6.0, "mlp": 5.0, "prompt-mamba2": 11.0, "draft-mamba2": 21.0}
    most |= {"greedy": 30.5, "sampled": 32.5}
    assert gates.most_launches(rows) == most


@by_message(
    ("limits", "options", "message"),
    [
        (["mamba2=5", "mlp=4"], {"most_growth": 4.2}, None),
        (["mamba2=4", "mlp=4"], {}, "mamba2: 5.0, the limit is 4;"),
        (["sampled=34"], {}, "sampled: nothing of this kind was compiled, the limit"),
        ([], {"most_growth": 4.0}, "p, g: memory grows by 4.10 %, the limit is 4 %"),
        ([], {"most_growth": 4.0, "growth": {}}, "growth of memory: no whole model was compiled"),
        ([], {"spilled": 2}, "2 programs spill registers"),
    ],
)
def test_limits(limits, options, message):
    rows = [row(1, all_bytes=1000), row(64, all_bytes=1041), row(16, all_bytes=1100)]
    growth = gates.growth_of_memory(rows)
    assert growth == {"p, g": pytest.approx(4.1)}
    assert gates.growth_of_memory(rows[:1]) == {}
    options = {"growth": growth, "most_growth": math.inf, "spilled": 0} | options
    most = {"mamba2": 5.0, "mlp": 4.0}
    found = gates.failures(most, [*map(gates.limit, limits)], **options)
    assert [each.startswith(message) for each in found] == ([True] if message else [])
