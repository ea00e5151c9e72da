"""Refusals of ops, and of their kernels alone: then XLA runs it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import native
from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.rms_norm import pallas_triton as rms_norm_kernel
from pallas_kernels.tree_attention import pallas_triton as attention_kernel
from pallas_kernels.tree_attention import pallas_triton_layer as attention_layer_kernel
from tests.cases import base, mamba2_layer, moe
from tests.cases import ssd as ssd_cases
from tests.cases import tree_attention as attention
from tests.cases import tree_attention_layer as attention_cases
from tests.cases import tree_delta as delta_cases
from tests.cases.ops import OPS
from tests.helpers import by_message, refusal

MIXER = mamba2_layer.PLAIN


def of_case(op, name, **changes):
    """A case with other sizes."""
    return functools.partial(OPS[op].check, OPS[op].cases[name].but(**changes))


def mixer(**sizes):
    layout = dataclasses.replace(MIXER, **sizes)
    return of_case("mamba2_layer", "tree, and a row with an empty path", layout=layout, nodes=3)


def experts_of(*changed, activation="silu", **sizes):
    given = moe.on_device(moe.MANY.but(**sizes))
    arguments = (*changed, *given[len(changed) :])
    return functools.partial(pk.expert_mlps, *arguments, activation=activation, gated=True)


ONE_WIDE = (jnp.ones((1, 2, 16)), jnp.ones((1, 0, 16)), jnp.ones((1, 16)), None)
TWO_NODES = jnp.zeros((1, 2, 1), jnp.int32)
NO_TOKENS = (jnp.ones((0, 32)), jnp.ones((0, 2)), jnp.zeros((0, 2), jnp.int32))
sequence_of = functools.partial(of_case, "ssd", "chunks and a rest", length=3)
REFUSED_BY_KERNELS = [
    (of_case("tree_scan", "tree", state=12), "state_size = 12 is not a power of two.*use 'xla'"),
    (of_case("replay", "tree", state=12), "state_size = 12 is not a power of two.*use 'xla'"),
    (of_case("tree_conv1d", "tree", heads=1, head_dim=4, state=4), "channels = 12 is not"),
    (mixer(state_size=256), "replay_tree_scan .* state_size = 256 of float32 inputs is more than"),
    (mixer(head_dim=18), "tree_conv1d_layer .* channels = 72 is not a multiple of 16; use 'xla'"),
    (of_case("tree_delta", "two nodes", head_dim=12), "head_dim = 12 is not a power of two.*use"),
    (of_case("tree_delta", "two nodes", state=256), "state_size = 256 of float32 inputs is more"),
    (of_case("gated_rms_norm", "gate then norm", size=40), "group size = 40.*use 'xla'"),
    (of_case("add_rms_norm", "float32", size=81), "add_rms_norm cannot run .* 81 .*; use 'xla'"),
    (sequence_of(head_dim=12), "head_dim = 12 is not a power of two"),
    (sequence_of(state=256), "state_size = 256 of float32 inputs is more than 128"),
    (
        lambda implementation: pk.tree_conv1d(
            *(*ONE_WIDE, jnp.zeros((1, 2, 1), jnp.int32)), implementation=implementation
        ),
        "width 1 has no state; use 'xla'",
    ),
    (of_case("matmul", "unpacked bf16", bf16=False), "in float32: only bfloat16 runs.* as TF32"),
    (of_case("matmul", "unpacked int4"), r"a matrix \(96, 70\) in 4 bits is XLA's; use"),
    (of_case("matmul", "unpacked int8", inputs=48), "inputs = 48 of .* not a multiple of 32; use"),
    (experts_of(width=24), "width = 24 is not a multiple of 16; use 'xla'"),
    (experts_of(hidden=20), "hidden size = 20 is not a multiple of 16; use 'xla'"),
    (experts_of(*NO_TOKENS), "there are no tokens; use 'xla'"),
    (experts_of(activation="gelu"), "error function, which gelu needs; use 'xla'"),
]


@by_message(("run", "message"), REFUSED_BY_KERNELS)
def test_the_kernel_refuses_and_xla_runs(run, message):
    refusal(message, run, implementation="pallas_interpret")
    run(implementation="xla")


ROW = jnp.ones((1, 16))
MIXED = (jnp.ones((1, 2, 12)), jnp.ones((1, 1, 12)), jnp.ones((2, 12)), None)


def conv_layer(channels=0, columns=0):
    """With some columns or channels fewer than the layout has."""
    channels = MIXER.num_channels - channels
    return pk.tree_conv1d_layer(
        jnp.ones((1, 1, MIXER.num_columns - columns)),
        *(jnp.ones((4, channels)), None, jnp.ones(4), jnp.ones((1, 3, channels))),
        jnp.zeros((1, 1, 4), jnp.int32),
        layout=MIXER,
    )


def gated_scan(**gate):
    x, dt, A = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 1, 2)), -jnp.ones(2)
    B, state, mask = jnp.ones((1, 1, 1, 16)), jnp.ones((1, 2, 16, 16)), jnp.ones((1, 1, 1), bool)
    return pk.tree_scan(x, dt, A, B, B, A, state, mask, gate=pk.Gate(jnp.ones((1, 1, 40)), **gate))


def attention_layer(first=0, columns=0):
    """Of nodes from a first one on, with some columns fewer than the layout has."""
    _, cache, depth, mask, *_ = attention_cases.on_device(CASE)
    layout = attention_cases.PLAIN
    projected = jnp.ones((len(depth), depth[:, first:].shape[1], layout.num_columns - columns))
    return pk.tree_attention_layer(
        projected, cache, depth[:, first:], mask[:, first:], layout=layout
    )


CASE = attention_cases.CASES["tree, and a row with an empty path"]
PIECE = attention.CASES["several blocks"]
X, WEIGHTS, CHOSEN, EXPERTS_IN, EXPERTS_OUT = moe.on_device(moe.MANY)
experts = functools.partial(pk.expert_mlps, X, WEIGHTS, CHOSEN, EXPERTS_IN, EXPERTS_OUT)


def sequence(groups=2, **options):
    x, dt, A, B, _, D, state = ssd_cases.on_device(ssd_cases.PLAIN)
    B = jnp.repeat(B[:, :, :1], groups, axis=2)
    return pk.ssd(x, dt, A, B, B, D, state, **options)


def delta(op=pk.tree_delta, groups=None, newest=0, prefix=None, channels=None, **options):
    """With so many groups, the newest nodes as queries, u of a prefix, or decays of channels."""
    given = delta_cases.arguments(op, DELTA)
    if groups is not None:  # of all that has some
        given = [
            jnp.repeat(x[:, :, :1], groups, 2) if x.ndim == 4 and x.shape[2] == 2 else x
            for x in given
        ]
    if op is not pk.tree_delta:
        return op(*given, **options)
    q, k, v, g, beta, *rest = given
    q, v, beta = (x[:, newest:] for x in (q, v, beta))
    g = g if channels is None else jnp.zeros((*g.shape, channels))
    return op(q, k, v, g, beta, *rest, prefix_u=prefix, **options)


DELTA = delta_cases.CASES["tree"]
DELTAS = (pk.tree_delta, pk.replay_delta, pk.replay_tree_delta, pk.delta_chunks)
ROWS, DENSE = jnp.ones((3, 40)), np.ones((4, 40, 70), np.float32)
MATRIX, SEVERAL, WHICH = PackedMatrix.pack(DENSE[0]), PackedMatrix.pack(DENSE), jnp.zeros(3, int)
pack = PackedMatrix.pack
REFUSED = [
    (lambda: matmul(ROWS[:, :39], MATRIX), r"rows of 39 inputs do not fit a matrix \(40, 70\)"),
    (lambda: matmul(ROWS, SEVERAL), "which = None with x .* need which"),
    (lambda: matmul(ROWS, MATRIX, WHICH), r"which = \(3,\) with x"),
    (lambda: matmul(ROWS, SEVERAL, WHICH[:2]), r"which = \(2,\) with x \(3, 40\)"),
    (
        lambda: matmul(ROWS, jnp.asarray(DENSE[0]), axis=-1),
        r"rows of 40 inputs do not fit a matrix \(40, 70\)",
    ),
    (
        lambda: matmul(ROWS, jnp.asarray(DENSE[0]), WHICH),
        r"rows \[rows, I\] of several packed matrices",
    ),
    (lambda: MATRIX.cut(3, 71), "columns 3 to 71 of 70"),
    (lambda: MATRIX.cut(0, 30).cut(0, 31), "columns 0 to 31 of 30"),
    (lambda: pack(DENSE[0], "float16"), r"\(40, 70\) as float16"),
    (lambda: pack(np.ones((2, 3))), r"got \(2, 3\) as float64"),
    (lambda: pack(DENSE[None]), r"got \(1, 4, 40, 70\)"),
    (lambda: delta(newest=1), "0 prefix and 12 query nodes are not 13 nodes"),
    (lambda: delta(prefix=jnp.zeros((2, 13, 4, 16))), "13 prefix and 13 query nodes are not 13"),
    (lambda: delta(channels=15), r"decays g of \(4, 15\) are neither of 4 heads nor of their 16"),
    (lambda: delta(pk.delta_chunks, chunk_size=0), "chunk_size = 0 is not positive"),
    *(
        (functools.partial(delta, op, **options), message.format(op.__name__))
        for op in DELTAS
        for options, message in (
            (dict(groups=3), "3 groups do not divide 4 heads"),
            (dict(implementation="cuda"), "'cuda' of {}; known"),
        )
    ),
    (
        lambda: pk.tree_conv1d(*MIXED, jnp.zeros((1, 2, 2), jnp.int32), activation="relu"),
        "activation = 'relu'",
    ),
    (lambda: conv_layer(columns=1), "the projection has 195 columns, .* has 196"),
    (lambda: attention_layer(columns=1), "has 127 columns, .* needs 128"),
    (
        lambda: pk.short_conv_layer(ONE_WIDE[0], *ONE_WIDE[2:], ONE_WIDE[1], TWO_NODES),
        "16 columns of the projection are not b, c and x of 16 channels",
    ),
    (lambda: conv_layer(channels=1), "conv_weight has 127 channels, .* has 128"),
    (lambda: gated_scan(start=9), "32 gates from column 9 on, of 40 columns"),
    (lambda: gated_scan(norm_weight=jnp.ones(16)), r"norm_weight \(16,\) is not of 32 channels"),
    (
        lambda: pk.tree_attention(
            *attention.inputs(PIECE), scale=0.25, window=3, implementation="pallas_interpret"
        ),
        "the kernel has no windows",
    ),
    (lambda: attention_layer(first=9), "0 prefix and 4 query nodes are not the 13 nodes"),
    (lambda: pk.gated_rms_norm(ROW, ROW, ROW[0], norm="norm"), "'norm' is not one of"),
    (lambda: pk.gated_rms_norm(ROW, ROW, ROW[0], norm="none"), "'none' with weight = "),
    (lambda: pk.gated_rms_norm(ROW, ROW, ROW[0], activation="gelu"), "activation = 'gelu' is not"),
    (lambda: pk.gated_rms_norm(ROW, ROW, None), "'gate_then_norm' with weight = None"),
    (lambda: pk.gated_rms_norm(ROW, ROW, ROW[0], num_groups=3), "3 groups do not divide rows of"),
    (
        lambda: pk.gated_rms_norm(ROW, jnp.ones((1, 40)), ROW[0], gate_start=25),
        "16 gates from column 25 on, of 40 columns",
    ),
    (lambda: experts(activation="silu", gated=False), "experts_in has 96 columns and experts_out"),
    (lambda: experts(activation="tanh", gated=True), "'silu', 'gelu', 'relu2'.*got 'tanh'"),
    (lambda: sequence(chunk_size=0), "chunk_size = 0 is not positive"),
    (lambda: sequence(groups=3), "3 groups do not divide 4 heads"),
]


@by_message(("call", "message"), REFUSED)
def test_refused(call, message):
    refusal(message, call)


BLOCKS = jnp.ones((2, 3, 40, 32))
INDEX = jnp.zeros(3, jnp.int32)
# Values, and what `tests/kernels/driver.cc` does not say of shapes: another message, or type.
REFUSED_BY_FUNCTIONS = [
    (dict(which=INDEX.at[2].set(2)), "there is no matrix 2 of 2"),
    (dict(which=INDEX.at[1].set(-1)), "there is no matrix -1 of 2"),
    (dict(which=INDEX[:0]), "every row needs the index of its matrix"),
    (dict(blocks=BLOCKS[..., :31]), "shapes do not fit"),
    (dict(first_block=-1), "there are fewer columns"),
    (dict(first_block=1.5), "Wrong scalar data type"),
    (dict(scales=jnp.ones((2, 3, 2, 32))), "shapes do not fit"),
    (dict(blocks=BLOCKS.astype(jnp.float16)), "are float32, bfloat16, int8 or uint8"),
    (dict(rows=ROWS.astype(jnp.bfloat16)), "Wrong buffer dtype"),
]


def product(rows=ROWS, blocks=BLOCKS, scales=None, which=INDEX, first_block=0):
    shape = jax.ShapeDtypeStruct((3, 70), jnp.float32)
    scales = jnp.zeros(0) if scales is None else scales
    return native.call("matmul", shape, rows, blocks, scales, which, first_block=first_block)


@base.NEEDS_NATIVE
@by_message(("changes", "message"), REFUSED_BY_FUNCTIONS)
def test_the_function_refuses(changes, message):
    """An error of the program that runs, never a read beyond an array."""
    np.testing.assert_array_equal(product(), np.full((3, 70), 40.0))
    # The second one if the program runs at once, and not behind others.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(product(**changes))


WIDE = dataclasses.replace(attention_cases.PLAIN, head_dim=272)


def native_obstacle(dtype, channels):
    return native.unsupported(jnp.ones(1, dtype), channels=channels)


# A check, its arguments and the reason; None: it runs. Sizes of the tables of ops run there.
CHECKS = [
    (rms_norm_kernel.unsupported, ("row size", 8192), None),
    (rms_norm_kernel.unsupported, ("row size", 1 << 15), "is more than 16384"),
    (attention_kernel.unsupported, (72,), "head_dim = 72 is not a multiple of 16"),
    (attention_kernel.unsupported, (272,), "head_dim = 272 is more than 256"),
    (attention_layer_kernel.unsupported, (attention_cases.PLAIN, 0), "the cache has capacity 0"),
    (attention_layer_kernel.unsupported, (WIDE, 1), "head_dim = 272 is more than 256"),
    (native_obstacle, ("float32", 40), "channels = 40 is not a multiple of 16"),
    (native_obstacle, ("bfloat16", 48), "native code is for float32, got bfloat16"),
]


@pytest.mark.parametrize(("check", "arguments", "reason"), CHECKS)
def test_which_sizes_run(check, arguments, reason):
    found = check(*arguments)
    assert found is None if reason is None else reason in found
