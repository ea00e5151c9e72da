"""Refusals of ops, and of their kernels alone: then XLA runs it."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from pallas_kernels import (
    Gate,
    expert_mlps,
    gated_rms_norm,
    native,
    replay,
    ssd,
    tree_attention,
    tree_attention_layer,
    tree_conv1d,
    tree_conv1d_layer,
    tree_scan,
)
from pallas_kernels.rms_norm import pallas_triton as rms_norm_kernel
from pallas_kernels.tree_attention import pallas_triton as attention_kernel
from pallas_kernels.tree_attention import pallas_triton_layer as attention_layer_kernel
from tests.cases import base, mamba2_layer, moe
from tests.cases import ssd as ssd_cases
from tests.cases import tree_attention as attention
from tests.cases import tree_attention_layer as attention_cases
from tests.cases.ops import OPS

MIXER = mamba2_layer.PLAIN
# An op, one of its cases with other sizes, and why the kernel refuses it.
REFUSED_BY_KERNELS = [
    ("tree_scan", "tree", dict(state=12), "state_size = 12 is not a power of two.*use 'xla'"),
    ("replay", "tree", dict(state=12), "state_size = 12 is not a power of two.*use 'xla'"),
    (
        *("tree_conv1d", "tree", dict(heads=1, head_dim=4, state=4)),
        "channels = 12 is not a multiple of 16",
    ),
    (
        *("mamba2_layer", "tree, and a row with an empty path"),
        dict(layout=dataclasses.replace(MIXER, state_size=256), nodes=3),
        "replay_tree_scan .* state_size = 256 of float32 inputs is more than 128; use 'xla'",
    ),
    (
        *("mamba2_layer", "tree, and a row with an empty path"),
        dict(layout=dataclasses.replace(MIXER, head_dim=18), nodes=3),
        "tree_conv1d_layer .* channels = 72 is not a multiple of 16; use 'xla'",
    ),
    *(
        ("tree_delta", "two nodes", changes, message)
        for changes, message in (
            (dict(head_dim=12), "head_dim = 12 is not a power of two.*use 'xla'"),
            (dict(state=128), "state_size = 128 of float32 inputs is more than 64; use 'xla'"),
        )
    ),
    ("gated_rms_norm", "gate then norm", dict(size=40), "group size = 40.*use 'xla'"),
    ("add_rms_norm", "float32", dict(size=81), "add_rms_norm cannot run .* 81 .*; use 'xla'"),
    *(
        ("ssd", "chunks and a rest", dict(length=3) | changes, message)
        for changes, message in (
            (dict(head_dim=12), "head_dim = 12 is not a power of two"),
            (dict(state=256), "state_size = 256 of float32 inputs is more than 128"),
            (dict(state=512, bf16=True), "state_size = 512 of bfloat16 inputs is more than 256"),
        )
    ),
]


@pytest.mark.parametrize(
    ("op", "name", "changes", "message"), REFUSED_BY_KERNELS, ids=lambda value: str(value)[:40]
)
def test_the_kernel_refuses_and_xla_runs(op, name, changes, message):
    case = OPS[op].cases[name].but(**changes)
    with pytest.raises(ValueError, match=message):
        OPS[op].errors(case, "pallas_interpret")
    OPS[op].check(case, "xla")


ONE_WIDE = (jnp.ones((1, 2, 16)), jnp.ones((1, 0, 16)), jnp.ones((1, 16)), None)
NO_TOKENS = (jnp.ones((0, 32)), jnp.ones((0, 2)), jnp.zeros((0, 2), jnp.int32))
# The same for calls that are no cases.
CALLS_REFUSED_BY_KERNELS = {
    "width 1 has no state; use 'xla'": functools.partial(
        tree_conv1d, *ONE_WIDE, jnp.zeros((1, 2, 1), jnp.int32)
    ),
    "width = 24 is not a multiple of 16; use 'xla'": functools.partial(
        expert_mlps, *moe.on_device(moe.MANY.but(width=24)), activation="silu", gated=True
    ),
    "hidden size = 20 is not a multiple of 16; use 'xla'": functools.partial(
        expert_mlps, *moe.on_device(moe.MANY.but(hidden=20)), activation="silu", gated=True
    ),
    "there are no tokens; use 'xla'": functools.partial(
        expert_mlps, *NO_TOKENS, *moe.on_device(moe.MANY)[3:], activation="silu", gated=True
    ),
    "error function, which gelu needs; use 'xla'": functools.partial(
        expert_mlps, *moe.on_device(moe.MANY), activation="gelu", gated=True
    ),
}


@pytest.mark.parametrize("message", CALLS_REFUSED_BY_KERNELS)
def test_the_kernel_refuses_a_call_and_xla_runs(message):
    run = CALLS_REFUSED_BY_KERNELS[message]
    with pytest.raises(ValueError, match=message):
        run(implementation="pallas_interpret")
    got = run()
    assert got.shape == run.args[0].shape
    base.assert_finite(got)


ROW = jnp.ones((1, 16))
MIXED = (jnp.ones((1, 2, 12)), jnp.ones((1, 1, 12)), jnp.ones((2, 12)), None)


def conv_layer(channels=0, columns=0):
    """With some columns or channels fewer than the layout has."""
    channels = MIXER.num_channels - channels
    return tree_conv1d_layer(
        jnp.ones((1, 1, MIXER.num_columns - columns)),
        *(jnp.ones((4, channels)), None, jnp.ones(4), jnp.ones((1, 3, channels))),
        jnp.zeros((1, 1, 4), jnp.int32),
        layout=MIXER,
    )


def gated_scan(**gate):
    x, dt, A = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 1, 2)), -jnp.ones(2)
    B, state, mask = jnp.ones((1, 1, 1, 16)), jnp.ones((1, 2, 16, 16)), jnp.ones((1, 1, 1), bool)
    return tree_scan(x, dt, A, B, B, A, state, mask, gate=Gate(jnp.ones((1, 1, 40)), **gate))


def attention_of_the_last_nodes():
    _, cache, depth, mask, _ = attention_cases.on_device(CASE)
    projected = jnp.ones((len(depth), 4, attention_cases.PLAIN.num_columns))
    return tree_attention_layer(
        projected, cache, depth[:, 9:], mask[:, 9:], layout=attention_cases.PLAIN
    )


CASE = attention_cases.CASES["tree, and a row with an empty path"]
PIECE = attention.CASES["several blocks"]
X, WEIGHTS, CHOSEN, EXPERTS_IN, EXPERTS_OUT = moe.on_device(moe.MANY)
experts = functools.partial(expert_mlps, X, WEIGHTS, CHOSEN, EXPERTS_IN, EXPERTS_OUT)


def sequence(groups=2, **options):
    x, dt, A, B, _, D, state = ssd_cases.on_device(ssd_cases.PLAIN)
    B = jnp.repeat(B[:, :, :1], groups, axis=2)
    return ssd(x, dt, A, B, B, D, state, **options)


REFUSED = [
    (
        lambda: replay(
            *(ROW[:, None, None], ROW[:, :1, None], -jnp.ones(1), ROW[:, None, None]),
            *(jnp.ones((1, 1, 16, 16)), jnp.ones((1, 1), bool)),
            implementation="cuda",
        ),
        "'cuda'.*'xla'",
    ),
    (
        lambda: tree_conv1d(*MIXED, jnp.zeros((1, 2, 2), jnp.int32), activation="relu"),
        "activation = 'relu'",
    ),
    (lambda: conv_layer(columns=1), "the projection has 195 columns, .* has 196"),
    (lambda: conv_layer(channels=1), "conv_weight has 127 channels, .* has 128"),
    (lambda: gated_scan(start=9), "32 gates from column 9 on, of 40 columns"),
    (lambda: gated_scan(norm_weight=jnp.ones(16)), r"norm_weight \(16,\) is not of 32 channels"),
    (
        lambda: tree_attention(
            *(*attention.inputs(PIECE), jnp.ones((2, 5, 40), bool)),
            scale=0.25,
            implementation="pallas_interpret",
        ),
        "no kernel has a mask over the cache",
    ),
    (attention_of_the_last_nodes, "0 prefix and 4 query nodes are not the 13 nodes"),
    (lambda: gated_rms_norm(ROW, ROW, ROW[0], norm="norm"), "'norm' is not one of"),
    (lambda: gated_rms_norm(ROW, ROW, ROW[0], norm="none"), "'none' with weight = "),
    (lambda: gated_rms_norm(ROW, ROW, None), "'gate_then_norm' with weight = None"),
    (lambda: gated_rms_norm(ROW, ROW, ROW[0], num_groups=3), "3 groups do not divide rows of 16"),
    *(
        (
            lambda implementation=implementation: gated_rms_norm(
                *(jnp.ones((3, 64)), jnp.ones((3, 200)), jnp.ones(64)),
                gate_start=137,
                implementation=implementation,
            ),
            "64 gates from column 137 on, of 200 columns",
        )
        for implementation in ("xla", "pallas_interpret")
    ),
    (
        lambda: experts(activation="silu", gated=False),
        "experts_in has 96 columns and experts_out 48 rows with gated = False",
    ),
    (lambda: experts(activation="tanh", gated=True), "'silu', 'gelu', 'relu2'.*got 'tanh'"),
    *(
        (lambda options=options: sequence(**options), message)
        for implementation in ("xla", "pallas_interpret")
        for options, message in (
            (dict(chunk_size=0, implementation=implementation), "chunk_size = 0 is not positive"),
            (dict(groups=3, implementation=implementation), "3 groups do not divide 4 heads"),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


RELEASED_SIZES = (16, 1024, 1536, 2688, 4096, 4480, 5120, 8192)
WIDE = dataclasses.replace(attention_cases.PLAIN, head_dim=272)


def native_obstacle(dtype, channels):
    return native.unsupported(jnp.ones(1, dtype), channels=channels)


# A check, its arguments and the reason; None: it runs.
CHECKS = [
    *((rms_norm_kernel.unsupported, ("row size", size), None) for size in RELEASED_SIZES),
    (rms_norm_kernel.unsupported, ("row size", 40), "row size = 40 is not a multiple of 16"),
    (rms_norm_kernel.unsupported, ("row size", 1 << 15), "is more than 16384"),
    *((attention_kernel.unsupported, (size,), None) for size in (16, 128, 160, 224, 256)),
    (attention_kernel.unsupported, (72,), "head_dim = 72 is not a multiple of 16"),
    (attention_kernel.unsupported, (272,), "head_dim = 272 is more than 256"),
    (attention_layer_kernel.unsupported, (attention_cases.PLAIN, 1), None),
    (attention_layer_kernel.unsupported, (attention_cases.ODD, 1), None),
    (attention_layer_kernel.unsupported, (attention_cases.PLAIN, 0), "the cache has capacity 0"),
    (attention_layer_kernel.unsupported, (WIDE, 1), "head_dim = 272 is more than 256"),
    (native_obstacle, ("float32", 48), None),
    (native_obstacle, ("float32", 40), "channels = 40 is not a multiple of 16"),
    (native_obstacle, ("bfloat16", 48), "native code is for float32, got bfloat16"),
]


@pytest.mark.parametrize(("check", "arguments", "reason"), CHECKS)
def test_which_sizes_run(check, arguments, reason):
    found = check(*arguments)
    assert found is None if reason is None else reason in found
