"""`matmul` beyond its table: rows to the bit, matrices, plans, transformations of JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from pallas_kernels.matmul import native as version
from pallas_kernels.matmul import pallas_triton as kernel
from pallas_kernels.matmul.api import matmul, partial_sums
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.matmul.quantized import GROUP, KINDS, QuantizedMatrix
from pallas_kernels.matmul.reference import matmul as reference
from pallas_kernels.matmul.reference import rounded
from pallas_kernels.numerics import gated, total
from tests.cases.base import NEEDS_NATIVE
from tests.cases.matmul import DTYPES
from tests.helpers import some

run = jax.jit(functools.partial(matmul, implementation="native"))
canonical = jax.jit(PackedMatrix.canonical)
PART = 256  # inputs


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bits(value):
    return np.asarray(value).view(np.int32)


def assert_same_bits(got, wanted):
    assert_array_equal(bits(got), bits(wanted))


# Inputs, columns and numbers of rows: of the demo's pair, as many inputs as presets have,
# vocabularies of two, and rows of several tasks.
ROWS = [
    *((*shape, range(1, 65)) for shape in ((384, 1676), (1024, 384), (2560, 144), (1856, 128))),
    *((*shape, (1, 2, 3, 4, 6, 7, 14, 17)) for shape in ((40, 50_280), (9, 248_320))),
    (260, 200, (1, 2, 120, 121, 260, 261, 400, 521)),
]


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "columns", "numbers"), ROWS)
def test_rows_are_alone(inputs, columns, numbers, dtype):
    """One program multiplies the first rows for each number, all by one matrix."""
    x = normal(max(numbers), inputs, seed=1)
    matrix = PackedMatrix.pack(normal(inputs, columns), dtype)
    products = jax.jit(lambda x, matrix: [version.matmul(x[:rows], matrix) for rows in numbers])
    *some, whole = map(bits, products(x, matrix))
    assert whole.shape == (len(x), columns)
    for y in some:
        assert_array_equal(y, whole[: len(y)])


# Rows, and blocks of rows, columns and inputs; all against the first.
PLANS = [(64, 64, 128, 64), (1, 16, 64, 64), (33, 64, 128, 32), (5, 16, 32, 128), (70, 32, 64, 32)]


@functools.cache
def by_plan(interpret, eight_bits, rows, *blocks):
    """The product with a matrix whose inputs have two parts; on a GPU of a real size."""
    inputs, columns = (256, 72) if interpret else (2560, 10576)
    x, matrix = normal(70, inputs, seed=1), normal(inputs, columns).astype(jnp.bfloat16)
    matrix = jax.tree.map(jnp.asarray, QuantizedMatrix.of(matrix) if eight_bits else matrix)
    plan = kernel.BlockSizes(*blocks, num_stages=1)
    options = dict(axis=-2, dtype="float32", interpret=interpret, blocks=plan)
    return bits(total(kernel.matmul(jnp.asarray(x[:rows], jnp.bfloat16), matrix, **options)))


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("plan", some(PLANS[1:], *PLANS[1:3]), ids=str)
def test_a_row_has_the_same_bits_in_all_plans(plan, eight_bits, interpret):
    both = [by_plan(interpret, eight_bits, *case) for case in (plan, PLANS[0])]
    rows = min(map(len, both))
    assert_array_equal(*(y[:rows] for y in both))


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_gated(axis, eight_bits):
    """A product whose halves one program has, to the bit as in two steps."""
    x, matrix = normal(20, 96, seed=1).astype(jnp.bfloat16), normal(96, 256).astype(jnp.bfloat16)
    matrix = matrix.T if axis == -1 else matrix
    matrix = QuantizedMatrix.of(matrix, axis) if eight_bits else matrix
    options = dict(axis=axis, dtype="bfloat16", implementation="pallas_interpret")
    assert kernel.gates(96, 256)
    product = matmul(*jax.tree.map(jnp.asarray, (x, matrix)), **options)
    got = partial_sums(*jax.tree.map(jnp.asarray, (x, matrix)), gate="silu", **options)
    assert_array_equal(got, gated("silu", product))


def test_parts_are_a_promise():
    """Other parts would be other bits. Of matrices of Mamba-2, Qwen3.5, Nemotron-H and a test."""
    shapes = {
        1: [(2560, 50288), (1024, 7168), (1024, 248_320), (96, 70)],
        2: [(2560, 10576), (768, 3352), (2688, 10304), (256, 72)],
        4: [(4096, 2688)],
        8: [(5120, 2560), (1536, 768), (4096, 1024)],
    }
    for parts in shapes:
        assert {parts} == {kernel.parts_of(*shape) for shape in shapes[parts]}


def in_order(x, matrix):
    """Fused multiply-adds over 256 inputs in order, from zero, and the sums of these in order."""
    total = np.zeros((len(x), matrix.shape[-1]), np.float32)
    for begin in range(0, len(matrix), PART):
        part = np.zeros_like(total)
        for k in range(begin, min(begin + PART, len(matrix))):
            part = (part + x[:, k, None].astype(np.float64) * matrix[k]).astype(np.float32)
        total = part if begin == 0 else total + part
    return total


@st.composite
def problems(draw):
    """Rows, inputs, the matrices, the first and last column that are used, and a type."""
    columns = draw(st.integers(1, 140))
    start = draw(st.integers(0, columns))
    return (
        *(draw(st.integers(0, 40)), draw(st.integers(1, 300)), draw(st.integers(0, 3)), columns),
        *(start, draw(st.integers(start, columns)), draw(st.sampled_from(DTYPES))),
    )


@NEEDS_NATIVE
@settings(max_examples=25)
@given(problems())
@example((3, 600, 0, 70, 0, 70, "float32"))
@example((1, 600, 2, 140, 0, 140, "bfloat16"))
@example((16, 600, 0, 33, 1, 33, "int8"))
@example((1, 600, 2, 140, 0, 140, "int4"))
@example((300, 290, 3, 131, 0, 131, "float32"))
@example((300, 290, 6, 131, 0, 131, "bfloat16"))
@example((300, 290, 6, 131, 0, 131, "int8"))
def test_sums_are_in_order(problem):
    """Of rows in float32, or in 8 bits as the weights; of several matrices the last has no rows."""
    rows, inputs, several, columns, start, stop, dtype = problem
    rng, x = np.random.default_rng(0), normal(rows, inputs, seed=1)
    zeros = rng.random(rows) < 0.3
    x[zeros] = 0
    x[1:2, :-1] = 0  # a row that begins with zeros
    dense = normal(*(several,) if several else (), inputs, columns)
    matrix = PackedMatrix.pack(dense, dtype).cut(start, stop)
    which = None
    if several:
        which = rng.integers(max(several - 1, 1), size=rows) * (rng.random(rows) < 0.4)
        which = which.astype(np.int32)
    y = np.asarray(run(x, matrix, which))
    if dtype in KINDS:
        whole = reference(x, np.asarray(matrix.blocks), np.asarray(matrix.scales), columns, which)
        assert_same_bits(y, whole[:, start:stop])
        return
    weights = np.asarray(canonical(matrix), np.float32)
    for index in range(max(several, 1)):
        own = slice(None) if which is None else which == index
        assert_same_bits(y[own], in_order(x[own], weights[index] if several else weights))


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_stay_in_their_row_and_column(dtype):
    x, dense = normal(5, 40), normal(40, 70)
    finite = np.asarray(run(x, PackedMatrix.pack(dense, dtype)))
    x[3, 7], dense[9, 69] = np.inf, np.nan
    y = np.asarray(run(x, PackedMatrix.pack(dense, dtype)))
    assert np.isnan(y[:, 69]).all()
    assert (np.isnan if dtype in KINDS else np.isinf)(y[3, :69]).all()
    assert_same_bits(np.delete(y, 3, 0)[:, :69], np.delete(finite, 3, 0)[:, :69])


def of_bytes(values):
    """A matrix with these weights, times a scale of each group and column."""
    groups = -(-values.shape[0] // GROUP)
    scales = np.abs(normal(groups, values.shape[1], seed=2)) / 100 + 0.01
    return PackedMatrix.pack(QuantizedMatrix(values, scales.astype(KINDS[values.dtype.name])))


@NEEDS_NATIVE
@pytest.mark.parametrize(("kind", "least"), [("int8", -128), ("int4", -8)])
def test_extreme_rows_in_8_bits(kind, least):
    """The least weight too: 32 of them times a row of 127 are the largest sum of integers."""
    x = normal(13, 70)
    x[1], x[2, :32] = 0, 0
    x[3, 40] = 1e34
    x[4, 7], x[5, 69], x[6, 33] = np.nan, np.inf, -np.inf
    x[7], x[8, :32] = 1e-40, 2.0**-101
    x[9], x[10] = 1, -1
    x[11, :] = np.arange(70) + 0.5  # halves
    x[11, [0, 40, 69]] = 127
    values = np.random.default_rng(2).integers(least, -least, size=(70, 40))
    values[:, 0], values[:, 1] = least, -least - 1
    matrix = of_bytes(values.astype(jnp.dtype(kind)))
    wanted = reference(x, np.asarray(matrix.blocks), np.asarray(matrix.scales), 40)
    assert np.isnan(wanted[4:7]).all()
    assert np.isfinite(np.delete(wanted, [4, 5, 6], 0)).all()
    assert not wanted[[1, 7]].any()
    assert_array_equal(run(x, matrix), wanted)


def test_rows_have_8_bits():
    """By hand: the largest is 127 steps, halves are even, and scales of groups differ."""
    row = np.zeros(33, np.float32)
    row[:5] = 254, 1, 3, 5, -254
    row[32] = -12.7
    values, scales = rounded(row)
    assert values[0, :5].tolist() == [127, 0, 2, 2, -127]
    assert values[1].tolist() == [-127, *[0] * 31]
    assert_array_equal(scales, np.array([2, np.float32(12.7) / np.float32(127)], "f"))


@NEEDS_NATIVE
def test_denormal_numbers_are_the_same_on_all_threads():
    """XLA's threads take them for zero."""
    matrix = PackedMatrix.pack(np.full((8, 100_000), 1e-20, np.float32))
    x = np.full((3, 8), 1e-20, np.float32)
    y = run(x, matrix)
    assert_same_bits(y, np.broadcast_to(run(x[:1], matrix.cut(0, 1)), y.shape))


def test_small_numbers_have_8_bits_too():
    """The least scale is 9e-41, which bfloat16 has, and what it makes 0 was below 5e-41."""
    dense = np.array([[1.8e-36, 1e-38, 1e-43], [-1.8e-36, 0.0, 0.0]], np.float32)
    packed = PackedMatrix.pack(dense, "int8")
    assert packed.quantized().values.tolist() == [[126, 109, 0], [-126, 0, 0]]


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
def test_vmap(dtype):
    """Over rows, matrices, the index of the matrix, and more than one of them."""

    def part(tree, index):
        return jax.tree.map(lambda leaf: leaf[index], tree)

    packed = [PackedMatrix.pack(matrices, dtype) for matrices in normal(3, 4, 40, 70)]
    several = jax.tree.map(lambda *leaves: jnp.stack(leaves), *packed)
    one = part(several, (slice(None), 0))
    x = jnp.asarray(normal(3, 5, 40))
    which = jnp.asarray(np.random.default_rng(0).integers(4, size=(3, 5)).astype(np.int32))
    for operands in ((x, one), (x, several, which)):
        *some, _ = itertools.product((0, None), repeat=len(operands))  # the last maps nothing
        for axes in some:
            both = list(zip(operands, axes, strict=True))
            given = [part(value, 0) if axis is None else value for value, axis in both]
            got = jax.jit(jax.vmap(run, in_axes=axes))(*given)
            for b in range(3):
                own = [part(value, 0 if axis is None else b) for value, axis in both]
                assert_same_bits(got[b], run(*own))
    twice = jax.vmap(jax.vmap(run, in_axes=(0, None)), in_axes=(0, None))(x, part(one, 0))
    assert_same_bits(twice, run(x, part(one, 0)))


@NEEDS_NATIVE
def test_rows_may_have_any_shape_and_type():
    narrow, matrix = normal(2, 3, 40).astype(jnp.bfloat16), PackedMatrix.pack(normal(40, 70))
    assert_same_bits(run(narrow, matrix)[1], run(narrow[1].astype(np.float32), matrix))
