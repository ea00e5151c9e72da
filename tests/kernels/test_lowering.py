"""Kernels lower for every GPU generation, without a GPU."""

import contextlib
import functools
import re

import jax
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch, triton
from pallas_kernels.matmul import QuantizedMatrix
from tests.cases.mamba2_layer import layer
from tests.helpers import some

pytestmark = pytest.mark.skipif(triton.UNAVAILABLE is not None, reason=str(triton.UNAVAILABLE))

DEVICES = {80: "NVIDIA A100", 86: "NVIDIA A10", 89: "NVIDIA L4", 90: "NVIDIA H100"}
# jax 0.10 lowers for CUDA without being told for which GPU, and so once for all of them.
CAPABILITIES = tuple(DEVICES) if jax.__version_info__ >= (0, 11) else ("any",)
# nodes, queries, heads, head_dim, state, groups: mamba2-2.7b, MambaInLlama-8B, Nemotron-H,
# Qwen3.5-9B, and small states, which a gated delta rule in float32 has.
SHAPES = [
    (1, 1, 80, 64, 128, 1),
    (13, 13, 80, 64, 128, 1),
    (64, 3, 32, 128, 128, 32),
    (100, 100, 64, 64, 128, 8),
    (64, 64, 32, 128, 128, 16),
    (13, 3, 4, 32, 64, 2),
]


@contextlib.contextmanager
def pretend_gpu(capability):
    """Tells jax 0.11 and later for which GPU to lower."""
    if capability == "any":
        yield
        return
    kind = dict(device_kind=DEVICES[capability], platform="gpu")
    device = jax.sharding.AbstractDevice(num_cores=None, **kind)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def check(function, arguments, capability, *, kernels, in_place, without=("pad",)):
    """Nothing is copied around the kernels, which two calls share; a new state replaces the old."""
    with pretend_gpu(capability):
        traced = jax.jit(lambda *given: (function(*given), function(*given))).trace(*arguments)
        code = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert code.count("__gpu$xla.gpu.triton") == kernels
    assert not {*without} & {*re.findall(r"stablehlo\.(\w+)", code)}
    assert ("output_operand_alias" in code) == in_place


def everywhere(test):
    """Runs a test in both types and for all GPU generations."""
    test = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])(test)
    return pytest.mark.parametrize("capability", CAPABILITIES)(test)


def struct(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(shape, dtype):
    nodes, queries, heads, head_dim, state, groups = shape
    small = functools.partial(struct, dtype=dtype)
    x, dt, A = small(2, nodes, heads, head_dim), struct(2, nodes, heads), struct(heads)
    B, C = small(2, nodes, groups, state), small(2, queries, groups, state)
    D, h = struct(heads, head_dim), struct(2, heads, head_dim, state)
    mask, path = struct(2, nodes, nodes, dtype="bool"), struct(2, nodes, dtype="bool")
    channels = heads * head_dim + 2 * groups * state
    conv = (small(2, nodes, channels), small(2, 3, channels), small(4, channels), small(channels))
    index = struct(2, queries, 4, dtype="int32")
    y, weight = small(2, queries, heads * head_dim), small(heads * head_dim)
    v, u = small(2, queries, heads, head_dim), struct(2, nodes, heads, head_dim)
    delta = (C, B, v, dt, struct(2, queries, heads), h, mask)
    prefix_u = [struct(2, nodes - queries, heads, head_dim)] if queries < nodes else []
    deltas = {"tree_delta": (*delta, *prefix_u), "replay_delta": (B, u, dt, h, path)}
    if not prefix_u:
        deltas["replay_tree_delta"] = (B, u, dt, path, *delta)
        g = struct(2, nodes, heads, state)
        of_channels = (g if array is dt else array for array in (B, u, dt, path, *delta))
        deltas["replay_tree_delta, decays of channels"] = tuple(of_channels)
    is_refused = dtype == "float32" and state > 64
    return ({} if is_refused else deltas) | {
        "tree_scan": (x, dt, A, B, C, D, h, mask),
        "replay": (x, dt, A, B, h, path),
        "replay_tree_scan": (x, dt, B, path, x, dt, A, B, C, D, h, mask),
        "ssd": (x, dt, A, B, B, D, h),
        "tree_conv1d": (*conv, index),
        "short_conv_layer": (small(2, queries, 3 * channels), *conv[2:], conv[1], index),
        "rms_norm": (y, weight),
        "log_softmax": (struct(2, queries, 50280),),
        "gated_rms_norm": (y, y, weight),
        "add_rms_norm": (y, y, weight),
        "add_rms_norm, deferred": (y, y, weight, struct(2, queries, 4 * heads)),
    }


def run(op, *arguments):
    if op == "tree_delta":
        *arguments, prefix_u = arguments if len(arguments) == 8 else (*arguments, None)
        return pk.tree_delta(*arguments, prefix_u=prefix_u, implementation="pallas")
    op, *_ = op.split(", ")
    if op != "add_rms_norm":
        options = {"epsilon": 1e-5} if op == "rms_norm" else {}
        return getattr(pk, op)(*arguments, **options, implementation="pallas")
    residual, output, weight, *parts = arguments
    if parts:
        output = pk.DeferredRMSNorm(output, *parts, 1e-5)
    return pk.add_rms_norm(residual, output, weight, epsilon=1e-5, implementation="pallas")


@everywhere
@pytest.mark.parametrize("shape", some(SHAPES, SHAPES[1]), ids=str)
def test_lowers_to_kernels(shape, dtype, capability):
    for op, arguments in operands(shape, dtype).items():
        in_place = "replay" in op or op == "ssd"
        call = functools.partial(run, op)
        check(call, arguments, capability, kernels=1, in_place=in_place)


@pytest.mark.thorough
@everywhere
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_experts_lower_to_two_kernels(tokens, activation, dtype, capability):
    gated = activation == "silu"
    arguments = (
        *(struct(tokens, 2688, dtype=dtype), struct(tokens, 6), struct(tokens, 6, dtype="int32")),
        struct(128, 2688, 3712 if gated else 1856, dtype=dtype),
        struct(128, 1856, 2688, dtype=dtype),
    )
    options = dict(activation=activation, gated=gated, implementation="pallas")
    call = functools.partial(pk.expert_mlps, **options)
    check(call, arguments, capability, kernels=2, in_place=False, without=("dot", "dot_general"))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("axis", [-2, -1])
def test_a_product_lowers_to_one_kernel(axis, capability):
    """Of more than 64 rows only where bits are wanted; else XLA multiplies."""
    matrix = struct(2560, 2560, dtype="bfloat16")
    product = functools.partial(pk.matmul, axis=axis, implementation="pallas")
    for rows, to_the_bit, kernels in ((1, False, 1), (64, False, 1), (65, True, 1), (65, False, 0)):
        x = struct(rows, 2560, dtype="bfloat16")
        for weights in (matrix, QuantizedMatrix.of(matrix, axis)):
            with dispatch.to_the_bit(to_the_bit):
                check(product, (x, weights), capability, kernels=kernels, in_place=False)


# Layouts of mamba2-2.7b, MambaInLlama-8B and Falcon-H1-0.5B; nodes, prefix nodes, and whether
# the gate and a norm over the whole row are in the scan. Of one node both kernels are one.
SCALED = pk.Mamba2Layout(24, 64, 1, 128, 24, 1, multipliers=(0.35, 0.25, 0.18, 0.5, 0.35))
LAYOUTS = [
    *(
        (pk.Mamba2Layout(80, 64, 1, 128, 80, 1), *nodes, True, True)
        for nodes in ((13, 0), (64, 61))
    ),
    (pk.Mamba2Layout(32, 128, 32, 128, x_heads=8, b_groups=8), 64, 0, False, False),
    (SCALED, 1, 0, True, False),
]


@everywhere
@pytest.mark.parametrize(
    "case", some(LAYOUTS, LAYOUTS[1]), ids=["plain", "prefix", "repeated", "scaled"]
)
def test_a_mixer_lowers_to_two_kernels_or_one(case, dtype, capability):
    layout, nodes, prefix, gated, normed = case
    heads, head_dim, channels = layout.num_heads, layout.head_dim, layout.num_channels
    small = functools.partial(struct, dtype=dtype)

    def pending(count):
        return pk.Mamba2Pending(
            *(small(2, count, heads, head_dim), struct(2, count, heads)),
            *(small(2, count, layout.num_groups, layout.state_size), small(2, count, channels)),
        )

    previous = pending(nodes), struct(2, nodes, dtype="bool"), struct(2, 3, dtype="int32")
    arguments = (
        small(2, nodes - prefix, layout.num_columns),
        (small(4, channels), small(channels), *[struct(heads)] * 3),
        (struct(2, heads, head_dim, layout.state_size), small(2, 3, channels)),
        struct(2, nodes - prefix, 4, dtype="int32"),
        struct(2, nodes, nodes, dtype="bool"),
        pending(prefix) if prefix else None,
        None if prefix else previous,
        small(heads * head_dim) if normed else None,
    )
    call = functools.partial(
        layer.__wrapped__,
        layout=layout,
        gated=gated,
        norm_epsilon=1e-5,
        implementation="pallas",
    )
    options = dict(kernels=1 if nodes == 1 else 2, in_place=not prefix, without=("pad", "slice"))
    check(call, arguments, capability, **options)


# queries, nodes, query heads, key heads, head_dim, capacity: Nemotron-H, Falcon-H1.
ATTENTION_SHAPES = [
    (1, 1, 32, 8, 128, 4096),
    (3, 63, 32, 8, 128, 1000),
    (13, 13, 8, 2, 64, 64),
    (13, 13, 4, 4, 224, 1000),
    (1, 1, 4, 2, 80, 100),
]


@pytest.mark.thorough
@everywhere
@pytest.mark.parametrize(
    ("shape", "rotated"),
    [
        pytest.param(shape, rotated, marks=pytest.mark.slow if i and rotated < 28 else ())
        for i, shape in enumerate(ATTENTION_SHAPES)
        for rotated in (0, 16, 28)
    ],
    ids=str,
)
def test_a_whole_attention_layer_lowers_to_kernels(shape, rotated, dtype, capability):
    queries, nodes, heads, groups, head_dim, capacity = shape
    small = functools.partial(struct, dtype=dtype)
    layout = pk.AttentionLayout(heads, groups, head_dim, 0.1, (1.0,) * rotated, key_multiplier=0.5)
    in_cache, weight = small(2, groups, capacity, head_dim), struct(head_dim)

    def keys(count):
        return pk.NodeKV(*[small(2, count, groups, head_dim)] * 2)

    if queries < nodes:
        options = {"prefix_pending": keys(nodes - queries)}
    else:
        options = {"previous": (keys(nodes), struct(2, nodes, dtype="bool"))}

    def run(*arguments):
        *arguments, weight, options = arguments
        if rotated == 16:
            options["norms"] = pk.HeadNorms(weight, weight, 1e-6)
        options |= dict(layout=layout, implementation="pallas")
        return pk.tree_attention_layer(*arguments, **options)

    cache = pk.KVCache(in_cache, in_cache, struct(2, dtype="int32"))
    depth, mask = struct(2, queries, dtype="int32"), struct(2, queries, nodes, dtype="bool")
    arguments = (small(2, queries, layout.num_columns), cache, depth, mask, weight, options)
    without = ("pad", "transpose")
    options = dict(in_place=queries == nodes, without=without)
    check(run, arguments, capability, kernels=2, **options)  # one adds up the parts
