"""`matmul`, rows times matrices, and `rows`, columns of a packed one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.matmul.api import matmul, rows
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.matmul.quantized import QuantizedMatrix
from pallas_kernels.matmul.reference import matmul as reference
from tests.cases import base
from tests.cases.base import Budget, Op, relative_error

DTYPES = ("float32", "bfloat16", "int8", "int4")
CASES = base.table(
    {
        "some rows": {},
        "one row": dict(rows=1),
        "no rows": dict(rows=0),
        "one input": dict(inputs=1),
        "no inputs": dict(inputs=0),
        "257 inputs": dict(inputs=257),
        "13 rows": dict(rows=13),
        "512 rows": dict(rows=512, columns=33),
        "several": dict(rows=9, matrices=4),
        "several, no rows": dict(rows=0, matrices=4),
        "several, one that is chosen": dict(rows=1, matrices=4),
        "several, of one": dict(matrices=1),
        "cut at blocks": dict(cut=(32, 64)),
        "cut in blocks": dict(cut=(5, 69)),
        "cut in the last block": dict(cut=(66, 69)),
        "no columns": dict(cut=(40, 40)),
        "bf16": dict(bf16=True),
        "bf16, one row": dict(rows=1, bf16=True),
        "bf16, 512 rows": dict(rows=512, columns=33, bf16=True),
        "bf16, several": dict(rows=9, matrices=4, bf16=True),
        "bf16, cut in blocks": dict(cut=(5, 69), bf16=True),
        **{
            f"{narrow}{name}": dict(narrow=narrow) | changes
            for narrow in ("int8", "int4")
            for name, changes in {
                "": {},
                ", one row": dict(rows=1),
                ", one input": dict(inputs=1),
                ", no inputs": dict(inputs=0),
                ", 13 rows": dict(rows=13, inputs=384),
                ", 512 rows": dict(rows=512, columns=33),
                ", several": dict(rows=9, matrices=4),
                ", several, cut in blocks": dict(rows=9, matrices=4, cut=(37, 69)),
            }.items()
        },
        **{
            f"unpacked {narrow or 'bf16'}{name}": dict(axis=axis, bf16=True, narrow=narrow)
            | changes
            for narrow in (None, "int8", "int4")
            for axis, name, changes in (
                (-2, "", dict(inputs=96)),
                (
                    -2,
                    ", one row, parts, no columns left over",
                    dict(rows=1, inputs=512, columns=64),
                ),
                (-1, ", a table", dict(rows=17, inputs=256)),
                (-2, ", blocks of rows", dict(rows=65, inputs=32, columns=130)),
            )
        },
    },
    rows=3,
    inputs=40,
    columns=70,
    matrices=0,  # 0: one, and no index of it
    cut=None,
    narrow=None,  # weights in few bits
    axis=None,  # of the inputs of an unpacked matrix
)


@functools.cache
def inputs(case):
    """Float64 rows and matrices that are exact in the case's type, and the matrix of each row."""
    rng, draw = base.drawn(case)
    several = (case.matrices,) if case.matrices else ()
    which = rng.integers(case.matrices, size=case.rows).astype(np.int32) if several else None
    return (draw(case.rows, case.inputs), draw(*several, case.inputs, case.columns), which)


def packed(case):
    """The matrix before it is cut."""
    return PackedMatrix.pack(inputs(case)[1].astype(np.float32), case.narrow or case.kind)


def unpacked(case):
    """An array, or one in 8 or 4 bits, which is widened to the case's type."""
    dense = inputs(case)[1].astype(case.kind)
    dense = dense.T if case.axis == -1 else dense
    if case.narrow:
        dense = QuantizedMatrix.of(dense, case.axis, case.narrow)
    return jax.tree.map(base.on_device, dense)


def on_device(case):
    x, _, which = inputs(case)
    if case.axis is not None:
        return base.on_device(x, case.kind), unpacked(case)
    matrix = packed(case)
    matrix = matrix if case.cut is None else matrix.cut(*case.cut)
    arguments = base.on_device(x, jnp.float32), matrix
    return arguments if which is None else (*arguments, base.on_device(which))


@functools.cache
def truth(case, rounds_rows):
    x, dense, which = inputs(case)
    if case.axis is not None:
        dense = dense.astype(np.float32)
        dense = QuantizedMatrix.of(dense, kind=case.narrow).wide() if case.narrow else dense
        return x @ np.asarray(dense, np.float64)
    whole = packed(case)
    if not rounds_rows:  # widened weights
        whole = PackedMatrix.pack(np.asarray(whole.canonical(), np.float32))
    scales = None if whole.scales is None else np.asarray(whole.scales)
    y = reference(x, np.asarray(whole.blocks), scales, case.columns, which)
    return y if case.cut is None else y[:, slice(*case.cut)]


@functools.cache
def errors(case, implementation):
    options = dict(axis=case.axis or -2, implementation=implementation)
    run = jax.jit(functools.partial(matmul, **options))
    rounds_rows = case.narrow is not None and implementation == "native"
    with dispatch.to_the_bit(True):  # with many rows too
        got = run(*on_device(case))
    wanted = truth(case, rounds_rows)
    assert got.dtype == jnp.float32
    assert got.shape == wanted.shape
    if not wanted.any() or rounds_rows:
        np.testing.assert_array_equal(got, wanted)
        return {"output": 0.0}
    error = relative_error(got, wanted)
    assert error < 5e-7 or implementation == "xla"
    return {"output": error}


def budgets(case):
    """XLA rounds weights of few bits to bfloat16."""
    return {"output": Budget(base.OUTPUT[True] if case.bf16 and case.narrow else 5e-7, 2.0)}


def lacks(case, implementation):
    """Native code is for packed matrices, and kernels are for the others but 4 bits."""
    if implementation == "xla":
        return False
    is_packed = case.axis is None
    return is_packed != (implementation == "native") or (not is_packed and case.narrow == "int4")


MATMUL = Op(CASES, errors, budgets, base.WITH_NATIVE, lacks=lacks)
ROW_CASES = base.table(
    {
        f"{kind}: {name}": changes | of_kind
        for kind, of_kind in {
            "float32": {},
            "bf16": dict(bf16=True),
            "int8": dict(narrow="int8"),
            "int4": dict(narrow="int4"),
        }.items()
        for name, changes in {
            "all columns": {},
            "a part": dict(cut=(5, 60)),
            "beyond a part": dict(cut=(5, 60), index=(-3, 55, 1 << 30)),
            "no columns": dict(index=()),
            "no inputs": dict(inputs=0),
        }.items()
    },
    **dict(rows=0, inputs=33, columns=70, matrices=0, cut=None, narrow=None, axis=None),
    index=(0, 31, 40, 2, 40, 54),
)


@functools.cache
def row_errors(case, implementation):
    """Columns are exact, of a part of a part too; one that there is not is its nearest."""
    whole, (first, last) = packed(case), case.cut or (0, case.columns)
    dense = inputs(case)[1].astype(np.float32)
    if case.narrow:
        dense = np.asarray(QuantizedMatrix.of(dense, kind=case.narrow).wide())
    index = np.array(case.index, np.int32).reshape(-1, 1)
    run = jax.jit(functools.partial(rows, implementation=implementation))
    part = whole.cut(first // 2, last).cut(first - first // 2, last - first // 2)
    got = run(part, base.on_device(index))
    wanted = dense.T[np.clip(first + index.astype(np.int64), first, last - 1)]
    np.testing.assert_array_equal(got, wanted)
    return {"rows": 0.0}


ROWS = Op(ROW_CASES, row_errors, lambda case: {"rows": Budget(1e-9)}, ("xla", "native"))
