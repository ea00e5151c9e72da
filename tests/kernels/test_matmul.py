"""`matmul` beyond its table: rows to the bit, transformations of JAX, and what is refused."""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels import native
from pallas_kernels.matmul import native as version
from pallas_kernels.matmul.api import matmul, rows
from pallas_kernels.matmul.packed import COLUMNS, GROUP, PackedMatrix
from pallas_kernels.native import build_backend
from stree_jax import HybridLM, ModelConfig, demo_path
from stree_jax.checkpoint.load import load_config
from stree_jax.models.presets import PRESETS
from tests.cases import matmul as cases
from tests.cases.base import NEEDS_NATIVE
from tests.cases.matmul import DTYPES

run = jax.jit(functools.partial(matmul, implementation="native"))
canonical = jax.jit(PackedMatrix.canonical)
PART = 256  # inputs


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bits(value):
    return np.asarray(value).view(np.int32)


def assert_same_bits(got, wanted):
    np.testing.assert_array_equal(bits(got), bits(wanted))


# Numbers of rows.


def assert_rows_are_alone(inputs, columns, dtype, numbers):
    """One program multiplies the first rows for each number, all by one matrix."""
    x = normal(max(numbers), inputs, seed=1)
    matrix = PackedMatrix.pack(normal(inputs, columns), dtype)
    products = jax.jit(lambda x, matrix: [version.matmul(x[:rows], matrix) for rows in numbers])
    *some, whole = map(bits, products(x, matrix))
    assert whole.shape == (len(x), columns)
    for y in some:
        np.testing.assert_array_equal(y, whole[: len(y)])


# Inputs and columns.
EMBEDDED = [
    *((384, 1676), (768, 384), (384, 2048), (1024, 384), (384, 640), (384, 384), (384, 4096)),
    *((256, 1096), (512, 256), (256, 4096)),
]
OF_PRESETS = [
    ("mamba2-2.7b", 2560, 10576),
    ("MambaInLlama-8B", 14336, 4096),
    ("Nemotron-3-Nano-30B", 1856, 2688),
    ("Granite-4-H-Tiny", 512, 1536),
]
VOCABULARIES = [(40, 50_280), (9, 248_320)]


def shapes(config):
    """Inputs and columns of all matrices that multiply rows."""
    layers = config.distinct_layers
    config = config.with_layers((*layers, layers[0]))  # a shared layer cannot be the last one
    model = nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0)))
    found = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path)
        if len(leaf.shape) > 1 and "conv_weight" not in name:
            found.add(leaf.shape[::-1] if re.search("embedding|head'", name) else leaf.shape[-2:])
    return found


def test_the_shapes_are_those_of_the_embedded_pair():
    target, draft = (shapes(load_config(demo_path(name))) for name in ("target", "draft"))
    assert target | draft == {*EMBEDDED}


def few(columns):
    """Columns, with as many in the last block."""
    return min(columns, 4 * COLUMNS + columns % COLUMNS)


# Inputs, columns and numbers of rows; a vocabulary's columns, and rows of several tasks.
ROWS = [
    *((inputs, columns, range(1, 65)) for inputs, columns in EMBEDDED),
    *((inputs, few(columns), range(1, 65)) for _, inputs, columns in OF_PRESETS),
    *((inputs, columns, (1, 2, 3, 4, 6, 7, 14, 17)) for inputs, columns in VOCABULARIES),
    (260, 200, (1, 2, 120, 121, 260, 261, 400, 521)),
]


def row_cases():
    """The embedded pair is not int8: some of its shapes in it are slow."""
    for case in ROWS:
        for dtype in DTYPES:
            slow = dtype == "int8" and case[:2] in EMBEDDED[3:]
            yield pytest.param(*case, dtype, marks=[pytest.mark.slow] * slow)


@NEEDS_NATIVE
@pytest.mark.parametrize(("inputs", "columns", "numbers", "dtype"), [*row_cases()])
def test_rows_are_alone(inputs, columns, numbers, dtype):
    assert_rows_are_alone(inputs, columns, dtype, numbers)


@pytest.mark.parametrize(("name", "inputs", "columns"), OF_PRESETS)
def test_the_shapes_are_those_of_presets(name, inputs, columns):
    assert (inputs, columns) in shapes(ModelConfig.preset(name))


@NEEDS_NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRESETS)
def test_rows_of_all_presets(name, dtype):
    for inputs, columns in {
        (size, few(columns)) for size, columns in shapes(ModelConfig.preset(name))
    }:
        assert_rows_are_alone(inputs, columns, dtype, range(1, 65))


# Sums.


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
@example((300, 290, 3, 131, 0, 131, "float32"))
@example((300, 290, 6, 131, 0, 131, "bfloat16"))
@example((300, 290, 6, 131, 0, 131, "int8"))
def test_sums_are_in_order(problem):
    """Also those of smaller types are of float32 rows and weights, and those of rows of zeros.

    Of several matrices the first has most rows, the last none.
    """
    rows, inputs, several, columns, start, stop, dtype = problem
    rng, x = np.random.default_rng(0), normal(rows, inputs, seed=1)
    zeros = rng.random(rows) < 0.3
    x[zeros] = 0
    x[1:2, :-1] = 0  # a row that begins with zeros
    dense = normal(*(several,) if several else (), inputs, columns)
    matrix = PackedMatrix.pack(dense, dtype).cut(start, stop)
    weights = np.asarray(canonical(matrix), np.float32)
    if not several:
        y = run(x, matrix)
        assert_same_bits(y, in_order(x, weights))
        return
    which = rng.integers(max(several - 1, 1), size=rows) * (rng.random(rows) < 0.4)
    y = np.asarray(run(x, matrix, which.astype(np.int32)))
    for index in range(several):
        assert_same_bits(y[which == index], in_order(x[which == index], weights[index]))


@NEEDS_NATIVE
def test_numbers_that_are_not_finite_stay_in_their_row_and_column():
    x, dense = normal(5, 40), normal(40, 70)
    finite = np.asarray(run(x, PackedMatrix.pack(dense)))
    x[3, 7], dense[9, 69] = np.inf, np.nan
    y = np.asarray(run(x, PackedMatrix.pack(dense)))
    assert np.isnan(y[:, 69]).all()
    assert np.isinf(y[3, :69]).all()
    assert_same_bits(np.delete(y, 3, 0)[:, :69], np.delete(finite, 3, 0)[:, :69])


@NEEDS_NATIVE
def test_denormal_numbers_are_the_same_on_all_threads():
    """XLA's threads take them for zero."""
    matrix = PackedMatrix.pack(np.full((8, 100_000), 1e-20, np.float32))
    x = np.full((3, 8), 1e-20, np.float32)
    y = run(x, matrix)
    assert_same_bits(y, np.broadcast_to(run(x[:1], matrix.cut(0, 1)), y.shape))


# Packed matrices.


@pytest.mark.parametrize("shape", [(40, 70), (3, 65, 64)], ids=str)
def test_a_packed_matrix_is_the_matrix(shape):
    dense = normal(*shape)
    for dtype in DTYPES:
        packed = PackedMatrix.pack(dense, dtype)
        assert packed.shape == shape
        assert packed.dtype == dtype
        step = np.zeros_like(dense)
        if dtype == "int8":
            groups = -(-shape[-2] // GROUP)
            for each in range(groups):
                rows = (..., slice(each * GROUP, each * GROUP + GROUP), slice(None))
                step[rows] = np.abs(dense[rows]).max(axis=-2, keepdims=True) / 127
            assert np.abs(packed.blocks).max() in (126, 127)
        else:
            dense = np.asarray(jnp.asarray(dense, dtype), np.float32)
        got = np.asarray(canonical(packed), np.float32)
        assert (np.abs(got - dense) <= 0.505 * step).all()
        np.testing.assert_array_equal(canonical(packed.cut(5, 60).cut(3, 50)), got[..., 8:55])
        assert packed.blocks.shape[-3:] == (-(-shape[-1] // COLUMNS), shape[-2], COLUMNS)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("native", marks=NEEDS_NATIVE)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_columns(dtype, implementation):
    """Also of a part of the matrix; a column that it does not have is its nearest one."""
    matrix = PackedMatrix.pack(normal(33, 70), dtype)
    found = jax.jit(functools.partial(rows, implementation=implementation))
    wanted = np.asarray(matrix.canonical(), np.float32).T
    index = jnp.array([[0, 31, 69], [40, 2, 40]])
    np.testing.assert_array_equal(found(matrix, index), wanted[index])
    np.testing.assert_array_equal(found(matrix.cut(5, 60), index % 55), wanted[5 + index % 55])
    beyond = jnp.array([-3, 55, 1 << 30])
    np.testing.assert_array_equal(found(matrix.cut(5, 60), beyond), wanted[[5, 59, 59]])
    assert found(matrix, index[:, :0]).shape == (2, 0, 33)
    assert found(PackedMatrix.pack(normal(0, 70), dtype), index).shape == (2, 3, 0)


def test_small_numbers_have_8_bits_too():
    """The least scale is 9e-41, which bfloat16 has, and what it makes 0 was below 5e-41."""
    dense = np.array([[1.8e-36, 1e-38, 1e-43], [-1.8e-36, 0.0, 0.0]], np.float32)
    packed = PackedMatrix.pack(dense, "int8")
    assert packed.blocks[0, :, :3].tolist() == [[126, 109, 0], [-126, 0, 0]]


# Transformations.


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
        for axes in itertools.product((0, None), repeat=len(operands)):
            if axes.count(None) == len(axes):
                continue
            both = list(zip(operands, axes, strict=True))
            given = [part(value, 0) if axis is None else value for value, axis in both]
            got = jax.jit(jax.vmap(run, in_axes=axes))(*given)
            for b in range(3):
                own = [part(value, 0 if axis is None else b) for value, axis in both]
                assert_same_bits(got[b], run(*own))
    twice = jax.vmap(jax.vmap(run, in_axes=(0, None)), in_axes=(0, None))(x, part(one, 0))
    assert_same_bits(twice, run(x, part(one, 0)))


@NEEDS_NATIVE
def test_rows_may_be_donated():
    """The product has the size of the rows, so it takes their place."""
    x, matrix = jnp.asarray(normal(70, 300)), PackedMatrix.pack(normal(300, 300), "bfloat16")
    wanted = run(x, matrix)
    given_away = x + 0.0
    got = jax.jit(run, donate_argnums=0)(given_away, matrix)
    assert given_away.is_deleted()
    assert_same_bits(got, wanted)


@NEEDS_NATIVE
def test_rows_may_have_any_shape():
    x, matrix = jnp.asarray(normal(2, 3, 40)), PackedMatrix.pack(normal(40, 70))
    y = run(x, matrix)
    assert y.shape == (2, 3, 70)
    assert_same_bits(run(x[1, 2], matrix), y[1, 2])
    narrow = x.astype(jnp.bfloat16)
    assert_same_bits(run(narrow, matrix), run(narrow.astype(jnp.float32), matrix))


@NEEDS_NATIVE
def test_in_a_scan():
    x, matrix = jnp.asarray(normal(3, 64)), PackedMatrix.pack(0.1 * normal(64, 64))

    @jax.jit
    def after(x):
        return lax.scan(lambda x, _: ((y := run(x, matrix)), y), x, length=4)

    last, steps = after(x)
    for y in steps:
        x = run(x, matrix)
        assert_same_bits(y, x)
    assert_same_bits(last, x)


@NEEDS_NATIVE
def test_the_fastest_on_a_cpu_is_native():
    x, matrix = cases.on_device(cases.CASES["some rows"])
    with jax.default_device(jax.devices("cpu")[0]):
        traced = str(jax.make_jaxpr(matmul)(x, matrix))
        assert "stree_jax_matmul" in traced
        assert_same_bits(matmul(x, matrix), run(x, matrix))
        by_xla = functools.partial(matmul, implementation="xla")
        assert "stree_jax_matmul" not in str(jax.make_jaxpr(by_xla)(x, matrix))


# Processes.

PROGRAM = """
import collections, json, jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
from pallas_kernels import native
from tests.cases.matmul import digest
print(json.dumps({"digest": digest(), "level": native.level(), **counts}))
"""
LEVELS = tuple(build_backend.levels())


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """What a process finds with these instructions; all share a cache of programs."""
    folder = tmp_path_factory.mktemp("programs")

    @functools.cache
    def found(level, *command):
        options = {
            "STREE_JAX_NATIVE": level,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        result = subprocess.run(
            [*command, sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | options,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return found


@pytest.mark.thorough
@NEEDS_NATIVE
@pytest.mark.parametrize("level", LEVELS)
def test_all_instructions_compute_the_same(process, level):
    if reason := build_backend.lacks(level):
        pytest.skip(f"this processor {reason}")
    found = process(level)
    assert found["level"] == level
    assert found["digest"] == cases.digest()


@pytest.mark.thorough
@NEEDS_NATIVE
def test_one_processor_computes_the_same(process):
    if not (taskset := shutil.which("taskset")):
        pytest.skip("there is no taskset")
    only = str(min(os.sched_getaffinity(0)))
    assert process(native.level(), taskset, "-c", only)["digest"] == cases.digest()


@pytest.mark.thorough
@NEEDS_NATIVE
def test_a_second_process_takes_the_program_from_the_cache(process):
    process(LEVELS[0])
    again = process(LEVELS[0], "env")  # runs it once more
    assert again["cache_hits"] == again["compile_requests_use_cache"] > 0
    assert again["digest"] == cases.digest()


# What is refused.

X, MATRIX, SEVERAL = (
    jnp.ones((3, 40)),
    PackedMatrix.pack(normal(40, 70)),
    PackedMatrix.pack(normal(4, 40, 70)),
)
WHICH = jnp.zeros(3, jnp.int32)
REFUSED = {
    "inputs": (
        lambda: matmul(X[:, :39], MATRIX),
        r"rows of 39 inputs do not fit a matrix \(40, 70\)",
    ),
    "no index": (lambda: matmul(X, SEVERAL), "which = None with x .* need which"),
    "an index of one": (lambda: matmul(X, MATRIX, WHICH), r"which = \(3,\) with x"),
    "few indices": (lambda: matmul(X, SEVERAL, WHICH[:2]), r"which = \(2,\) with x \(3, 40\)"),
    "many indices": (lambda: matmul(X[:2], SEVERAL, WHICH), r"which = \(3,\) with x \(2, 40\)"),
    "batches": (lambda: matmul(X[None], SEVERAL, WHICH), r"with x \(1, 3, 40\)"),
    "a name": (lambda: matmul(X, MATRIX, implementation="fast"), "unknown implementation 'fast'"),
    "a cut": (lambda: MATRIX.cut(3, 71), "columns 3 to 71 of 70"),
    "a cut before": (lambda: MATRIX.cut(-1, 5), "columns -1 to 5 of 70"),
    "a cut backwards": (lambda: MATRIX.cut(5, 4), "columns 5 to 4 of 70"),
    "a cut of a cut": (lambda: MATRIX.cut(0, 30).cut(0, 31), "columns 0 to 31 of 30"),
    "float16": (lambda: PackedMatrix.pack(normal(40, 70), "float16"), r"\(40, 70\) as float16"),
    "float64": (lambda: PackedMatrix.pack(np.ones((2, 3))), r"got \(2, 3\) as float64"),
    "int32": (lambda: PackedMatrix.pack(np.ones((2, 3), int), "int32"), "as int32"),
    "a vector": (lambda: PackedMatrix.pack(normal(40)), r"got \(40,\) as float32"),
    "four axes": (lambda: PackedMatrix.pack(normal(1, 1, 2, 3)), r"got \(1, 1, 2, 3\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    """Before anything is lowered."""
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: (call(), None)[1])


# What the function of the library refuses itself.

NONE, NOBODY = jnp.zeros(0), jnp.zeros(0, jnp.int32)
FITS = {
    "rows": jnp.ones((3, 40)),
    "blocks": jnp.ones((2, 3, 40, 32)),
    "scales": NONE,
    "which": WHICH,
    "result": (3, 70),
    "first_block": 0,
}
ONE = {"blocks": jnp.ones((1, 3, 40, 32)), "which": NOBODY}
BYTES = {"blocks": jnp.ones((2, 3, 40, 32), jnp.int8), "scales": jnp.ones((2, 3, 2, 32))}
SHAPES, SCALES = "shapes do not fit", "scales do not fit"
FEWER, INDEX = "there are fewer columns", "every row needs the index of its matrix"
WRONG = [
    ({"blocks": jnp.ones((2, 3, 40, 31))}, SHAPES),
    ({"blocks": jnp.ones((2, 3, 41, 32))}, SHAPES),
    ({"blocks": jnp.ones((3, 40, 32))}, SHAPES),
    ({"rows": jnp.ones((3, 39))}, SHAPES),
    ({"rows": jnp.ones((1, 3, 40))}, SHAPES),
    ({"result": (4, 70)}, SHAPES),
    ({"result": (3, 70, 1)}, SHAPES),
    ({"result": (3, 97)}, FEWER),
    ({"first_block": 1}, FEWER),
    ({"first_block": -1}, FEWER),
    ({"first_block": 2**63 - 1}, FEWER),
    ({"scales": jnp.ones((2, 3, 2, 32))}, SCALES),
    (BYTES | {"scales": NONE}, SCALES),
    (BYTES | {"scales": jnp.ones((2, 3, 1, 32))}, SCALES),
    (BYTES | {"scales": jnp.ones((2, 2, 2, 32))}, SCALES),
    (BYTES | {"scales": jnp.ones((1, 3, 2, 32))}, SCALES),
    (BYTES | {"scales": jnp.ones((2, 3, 2, 31))}, SCALES),
    (BYTES | {"scales": jnp.ones((3, 2, 32))}, SCALES),
    ({"which": jnp.zeros(2, jnp.int32)}, INDEX),
    ({"which": jnp.zeros(4, jnp.int32)}, INDEX),
    ({"which": jnp.zeros((3, 1), jnp.int32)}, INDEX),
    ({"which": NOBODY}, INDEX),
    (ONE | {"which": jnp.zeros(2, jnp.int32)}, INDEX),
    ({"which": jnp.array([0, 1, 2])}, "there is no matrix 2 of 2"),
    ({"which": jnp.array([0, -1, 1])}, "there is no matrix -1 of 2"),
    ({"blocks": jnp.ones((0, 3, 40, 32))}, "there is no matrix 0 of 0"),
    ({"blocks": jnp.ones((2, 3, 40, 32), jnp.float16)}, "are float32, bfloat16 or int8"),
    ({"blocks": jnp.ones((2, 3, 40, 32), jnp.uint8)}, "are float32, bfloat16 or int8"),
    ({"rows": jnp.ones((3, 40), jnp.bfloat16)}, "Wrong buffer dtype"),
    ({"which": jnp.zeros(3)}, "Wrong buffer dtype"),
    ({"first_block": 1.5}, "Wrong scalar data type"),
]


def called(rows, blocks, scales, which, result, first_block):
    shape = jax.ShapeDtypeStruct(result, jnp.float32)
    return native.call("matmul", shape, rows, blocks, scales, which, first_block=first_block)


@NEEDS_NATIVE
@pytest.mark.parametrize(("changes", "message"), WRONG, ids=range(len(WRONG)))
def test_the_function_checks_its_arguments(changes, message):
    """A wrong size is an error of the program that runs, never a read beyond an array."""
    # The second one if the program runs at once, and not behind others.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(called(**FITS | changes))


@NEEDS_NATIVE
@pytest.mark.parametrize(
    "changes", [{}, ONE, BYTES, {"result": (3, 96)}, {"first_block": 3, "result": (3, 0)}]
)
def test_what_fits_runs(changes):
    y = called(**FITS | changes)
    np.testing.assert_array_equal(y, np.full(y.shape, 40.0))
