"""`matmul` of unpacked matrices in bfloat16 and in 8 bits as one Pallas-Triton kernel.

Passes: a program handles a block of columns, a block of up to 64 rows, and one of a few parts of
the inputs. It reads its part of the matrix once, block by block. It multiplies transposed, columns
by inputs by rows: so a matrix unit has the few rows on its narrow side. Each part writes float32
sums. The reader adds them up: the next kernel while it loads, or XLA in a launch. A product of one
part is written in its final type.

Of few rows, every program may also compute its inputs, into memory of its own, which it reads
after a barrier. It adds up the residual stream and norms it, and the first program writes both
(`NormedSum`). Or it gates and norms its part of the rows, which may be outputs of attention as
parts of a softmax (`GatedNorm`).

Numerics: products of bfloat16 numbers are exact, and are added in float32: inputs in order, then
parts in pairs. 8-bit weights are exact in bfloat16 too. So the sum of a group of 32 inputs is
multiplied by its scale, by one fused multiply-add: no weight is rounded, as widening would do, and
no scale has to be spread over the inputs.

The bits of a row: an H200 gave the same ones for any number of rows, any block of rows, columns or
inputs, and any instruction, warps and stages (a trial of this algorithm in bfloat16). They depend
on the number of parts. So `parts_of` knows the shape of the matrix alone, and `block_sizes` may
choose whatever is fast.

Refuses 4 bits; float32, which a GPU multiplies as TF32; inputs that are not a multiple of
`SMALLEST_BLOCK`, or of a group of 8-bit weights; several matrices; and 2^31 weights or more.
Columns and rows may have any number: what is beyond the last is masked off. Derivatives are XLA's.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels import triton as tb
from pallas_kernels.matmul.quantized import GROUP, QuantizedMatrix
from pallas_kernels.matmul.xla import unpacked
from pallas_kernels.numerics import (
    DeferredRMSNorm,
    PartialSums,
    Product,
    activate,
    static,
    totals,
)
from pallas_kernels.rms_norm import pallas_triton as rms_norm
from pallas_kernels.rms_norm.api import GatedNorm
from pallas_kernels.tree_attention.online_softmax import SoftmaxParts, channels
from pallas_kernels.triton import Ref

MOST_ROWS = 64  # of a block; more are XLA's where nobody wants bits
MOST_NORMED = 4  # rows, one after the other, where the product norms them
MOST_GROUPS = 8  # of a part of a row, likewise
GATED_COLUMNS = 64  # of a block of each half of a gated product
NUM_WARPS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormedSum:
    """Rows that a product adds up and norms first, by the arguments of `add_rms_norm`."""

    residual: jax.Array
    output: Any
    weight: jax.Array
    epsilon: float = static()
    multiplier: float = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return self.residual.shape

    @property
    def dtype(self) -> Any:
        """Of their norms."""
        output = self.output
        return (output.value if isinstance(output, DeferredRMSNorm) else output).dtype


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on: speed, and no bits."""

    rows: int
    columns: int
    inner: int  # inputs of a step; reduced to a divisor of the inputs of a part
    num_stages: int  # Triton's


def parts_of(inputs: int, columns: int) -> int:
    """The number of parts of the inputs, which are added up in pairs: a power of two.

    To change this is to change the bits of every product. Enough programs are wanted to load a
    large GPU, and parts that are long enough to be worth it.
    """
    programs, parts = -(-columns // 64), 1
    while parts < 8 and inputs % (128 * parts) == 0 and inputs >= 256 * parts:
        many, long = programs * parts >= 96, inputs // (2 * parts) >= 640
        if many and (not long or programs * parts >= 256):
            break
        parts *= 2
    return parts


def block_sizes(inputs: int, columns: int, rows: int) -> BlockSizes:
    """Block sizes for a matrix and rows, in shared memory that all GPUs have: 99 KiB.

    In bfloat16 the fastest of a trial on an H200, or near it. In 8 bits no GPU has timed them.
    """
    block_rows = min(MOST_ROWS, tb.padded_size(rows))
    if -(-columns // 64) * parts_of(inputs, columns) >= 256:
        return BlockSizes(block_rows, columns=128, inner=64, num_stages=4)
    stages = 3 if block_rows > 32 else 4
    return BlockSizes(block_rows, columns=64, inner=128, num_stages=stages)


def gates(inputs: int, columns: int) -> bool:
    """Whether a product has all inputs of both its halves in one program, which may gate them."""
    return parts_of(inputs, columns) == 1 and columns % (2 * GATED_COLUMNS) == 0


def begins_with(x: NormedSum | GatedNorm, matrix: Any, axis: int, gate: str | None) -> bool:
    """Whether every program of a product computes its rows again, which saves a launch."""
    count, size = math.prod(x.shape[:-1]), x.shape[-1]
    if unsupported(x, matrix, axis) or size != matrix.shape[axis]:
        return False
    columns = matrix.shape[-3 - axis]
    parts = parts_of(size, columns)
    blocks = parts * -(-columns // block_sizes(size, columns, count).columns)
    if gate is not None:
        blocks = columns // (2 * GATED_COLUMNS)
    if isinstance(x, NormedSum):
        group, read = size, _bytes((x.residual, x.output))
        fits = gate is None or gates(size, columns)
    else:
        part, group = size // parts, _group(x, size // parts)
        read = _bytes(x.y)
        if x.gate is not None:
            read += _bytes(x.gate) * size // x.gate.shape[-1]
        read //= parts
        fits = gate is None and part % group == 0 and part // group <= MOST_GROUPS
    # With as many warps as the norms' own kernels have, sums have their order.
    fits &= not rms_norm.unsupported("group size", group) and rms_norm.warps(group) == NUM_WARPS
    return fits and 0 < count <= MOST_NORMED and blocks * read <= tb.MOST_REPEATED_BYTES


def _group(x: GatedNorm, part: int) -> int:
    """Columns of a part of a row that are computed at once."""
    if isinstance(x.y, SoftmaxParts):
        return x.y.arrays["sums"].shape[-1]
    return part if x.norm == "none" else x.shape[-1] // x.num_groups


def _bytes(arrays: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def unsupported(x: Any, matrix: Any, axis: int) -> str | None:
    """Why this product cannot run, or None."""
    is_quantized = isinstance(matrix, QuantizedMatrix)
    dtype = jnp.dtype(matrix.dtype)
    if len(matrix.shape) != 2:
        return f"several matrices {matrix.shape} are XLA's"
    if is_quantized and matrix.kind == "int4":
        return f"a matrix {matrix.shape} in 4 bits is XLA's"
    if not x.dtype == dtype == jnp.bfloat16:
        return (
            f"rows in {x.dtype} and a matrix in {dtype}: only bfloat16 runs, since a GPU multiplies"
            " float32 inputs as TF32"
        )
    inputs, unit = matrix.shape[axis], GROUP if is_quantized else tb.SMALLEST_BLOCK
    if inputs % unit:
        return f"inputs = {inputs} of a matrix {matrix.shape} is not a multiple of {unit}"
    if not 0 < math.prod(matrix.shape) < 1 << 31:
        return f"a matrix {matrix.shape} has no weights, or 2^31 or more"
    return None


@functools.partial(jax.jit, static_argnames=("axis", "dtype", "gate", "interpret", "blocks"))
def partial_sums(
    x: Any,
    matrix: Any,
    *,
    axis: int,
    dtype: DTypeLike,
    gate: str | None = None,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> Any:
    """See `api.partial_sums` and `api.normed_product`; `blocks` None: those of `block_sizes`."""
    inputs, columns = matrix.shape[axis], matrix.shape[-3 - axis]
    blocks = blocks or block_sizes(inputs, columns, math.prod(x.shape[:-1]))
    parts = parts_of(inputs, columns)
    size = inputs // parts
    firsts = [0]  # blocks of columns, of each half of a gated product
    if gate is not None:
        columns //= 2
        # As much shared memory as twice the columns.
        blocks = BlockSizes(blocks.rows, columns=GATED_COLUMNS, inner=64, num_stages=4)
        firsts = [0, columns // GATED_COLUMNS]
    shape, count = (*x.shape[:-1], columns), math.prod(x.shape[:-1])
    num_blocks = -(-columns // blocks.columns)

    def of_columns(inner: int, first: int) -> pl.BlockSpec:
        """A block of an array that has the axes of the matrix."""
        if axis == -1:
            return pl.BlockSpec((blocks.columns, inner), lambda r, c, p: (first + c, p))
        return pl.BlockSpec((inner, blocks.columns), lambda r, c, p: (p, first + c))

    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {}
    begin, width = None, inputs  # of the rows that a program computes
    if isinstance(x, NormedSum):
        arrays, outputs, epsilon = rms_norm.arrays_of_sum(x.residual, x.output, x.weight, "bcp")
        multiplier = x.multiplier
        options: Any = dict(epsilon=x.epsilon, multiplier=multiplier, output_epsilon=epsilon)
        begin = functools.partial(_write_sums, options)
    elif isinstance(x, GatedNorm):
        x.check()
        arrays, read = {}, _of_array
        if isinstance(x.y, SoftmaxParts):
            arrays, read = x.y.blocked("rcp"), functools.partial(_of_softmax, x.y.put_together)
        else:
            arrays["y"] = rms_norm.in_rows(x.y, "bcp")
        if x.gate is not None:
            arrays["gate"] = rms_norm.in_rows(x.gate, "bcp")
        if x.weight is not None:
            arrays["weight"] = tb.blocked(x.weight, ".", "bcp")
        options = dict(norm=x.norm, epsilon=x.epsilon, activation=x.activation)
        group = _group(x, size)
        begin, width = functools.partial(_write_gated, read, options, group, x.gate_start), size
    else:
        rows = x.reshape(-1, inputs)
        arrays = {"x": (rows, pl.BlockSpec((blocks.rows, size), lambda r, c, p: (r, p)))}
    if begin is not None:
        outputs["x"] = (
            jax.ShapeDtypeStruct((num_blocks, parts, count, width), x.dtype),
            pl.BlockSpec((None, None, blocks.rows, width), lambda r, c, p: (c, p, 0, 0)),
        )
    weights = {"weights": (matrix, size)}
    if isinstance(matrix, QuantizedMatrix):
        weights = {"weights": (matrix.values, size), "scales": (matrix.scales, size // GROUP)}
    for half, first in enumerate(firsts):
        for name, (array, inner) in weights.items():
            arrays[f"{name} {half}"] = array, of_columns(inner, first)
    outputs["y"] = (
        jax.ShapeDtypeStruct((parts, count, columns), dtype if parts == 1 else jnp.float32),
        pl.BlockSpec((None, blocks.rows, blocks.columns), lambda r, c, p: (p, r, c)),
    )
    results = tb.call_by_name(
        functools.partial(
            _kernel,
            rows=count,
            columns=columns,
            size=size,
            inner=math.gcd(size, blocks.inner),
            axis=axis,
            gate=gate,
            begin=begin,
            interpret=interpret,
        ),
        arrays,
        outputs,
        name="matmul" if begin is None else "normed_matmul",
        num_warps=NUM_WARPS,
        num_stages=blocks.num_stages,
        interpret=interpret,
        in_one_order=True,
        # Programs that read the same weights are neighbours.
        grid=(-(-count // blocks.rows), num_blocks, parts),
    )
    sums = results["y"].reshape(parts, *shape)
    product = sums[0] if parts == 1 else PartialSums(sums, dtype)
    if not isinstance(x, NormedSum):
        return product
    return results["sum"].reshape(x.shape), results["normed"].reshape(x.shape), product


def matmul(x: Any, matrix: Any, **options: Any) -> Product:
    """See `api.partial_sums`; derivatives are XLA's."""
    if isinstance(x, GatedNorm) and not begins_with(x, matrix, options["axis"], options["gate"]):
        x = x.total()

    def twin(x: Any, matrix: Any) -> Product:
        """XLA's product as the first of as many parts."""
        settings = {name: options[name] for name in ("axis", "dtype", "gate")}
        product = unpacked(totals(x), matrix, **settings)
        parts = parts_of(x.shape[-1], matrix.shape[-3 - options["axis"]])
        if parts == 1:
            return product
        sums = jnp.zeros((parts, *product.shape), jnp.float32)
        return PartialSums(sums.at[0].set(product.astype(jnp.float32)), product.dtype)

    return dispatch.with_gradients_of(twin, functools.partial(partial_sums, **options))(x, matrix)


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    rows: int,
    columns: int,
    size: int,
    inner: int,
    axis: int,
    gate: str | None,
    begin: Callable[..., Any] | None,
    interpret: bool,
) -> None:
    """Refs by name; K are the inputs of a part, `size` in number.

    inputs: x [r, K], or those of `begin`; weights 0 [K, c], of a table [c, K]; scales 0 of 8-bit
    weights [K / 32, c], of a table [c, K / 32]; weights 1 and scales 1 of the second half of a
    gated product.
    outputs: y [r, c]; those of `begin`, which writes x for the program alone.
    """
    x_ref, first_input = inputs.get("x"), 0
    if begin is not None:
        x_ref, first_input = outputs["x"], begin(inputs, outputs, rows, size)
        tb.barrier(interpret)
    output_ref = outputs["y"]
    halves = [
        [inputs[f"{name} {half}"] for name in ("weights", "scales") if f"{name} 0" in inputs]
        for half in range(1 if gate is None else 2)
    ]
    is_quantized = len(halves[0]) == 2
    block_rows, block_columns = output_ref.shape
    row_mask = _mask(0, block_rows, rows, 0)
    column_mask = _mask(1, block_columns, columns, -1 - axis)
    load = functools.partial(tb.masked_load, interpret=interpret)

    def of_columns(ref: Ref, first: int | jax.Array, count: int) -> jax.Array:
        """Of all columns, at `count` places on the axis of inputs."""
        index = pl.ds(first, count), pl.ds(0, block_columns)
        return load(ref, index if axis == -2 else index[::-1], column_mask)

    def scales_of(ref: Ref, group: int | jax.Array) -> jax.Array:
        return of_columns(ref, group, 1).astype(jnp.float32).reshape(block_columns, 1)

    width = GROUP if is_quantized else inner
    zeros = jnp.zeros((block_columns, block_rows), jnp.float32)

    def add(half: Any, sums: Any, first: jax.Array, x: jax.Array) -> Any:
        """The sum with the products of `width` inputs, and the scales of the next."""
        total, scales = sums
        weights = of_columns(half[0], first, width).astype(jnp.bfloat16)
        before = zeros if is_quantized else total
        added = tb.add_product(before, weights, x, trans_a=axis == -2, interpret=interpret)
        if not is_quantized:
            return added, scales
        # Triton itself loads ahead only what becomes an operand of a product.
        following = scales_of(half[1], jnp.minimum(first // GROUP + 1, size // GROUP - 1))
        return tb.multiply_add(added, scales, total, interpret=interpret), following

    def step(i: jax.Array, carry: list[Any]) -> list[Any]:
        for first in (i * inner + offset for offset in range(0, inner, width)):
            x = load(x_ref, (pl.ds(0, block_rows), pl.ds(first_input + first, width)), row_mask)
            carry = [add(half, sums, first, x) for half, sums in zip(halves, carry, strict=True)]
        return carry

    start = [(zeros, scales_of(half[1], 0) if is_quantized else None) for half in halves]
    total, *up = (sums for sums, _ in lax.fori_loop(0, size // inner, step, start))
    if gate is not None:
        total, up = (half.astype(output_ref.dtype) for half in (total, *up))
        total = activate(gate, total) * up
    masks = row_mask, _mask(1, block_columns, columns, 1)
    tb.masked_store(output_ref, total.T.astype(output_ref.dtype), masks, interpret=interpret)


def _write_sums(
    options: dict[str, float], inputs: dict[str, Ref], outputs: dict[str, Ref], rows: int, size: int
) -> Any:
    """Adds up and norms rows, and says where the inputs of the part begin in x [r, M].

    inputs: those of `rms_norm.pallas_triton.added_and_normed`; outputs: sum and normed [R, M].
    """
    is_first = (pl.program_id(1) == 0) & (pl.program_id(2) == 0)
    for row in range(rows):
        parts = rms_norm.added_and_normed(inputs, (row,), **options)
        for part, _, normed in parts:
            outputs["x"][row, part] = normed.astype(outputs["x"].dtype)

        @pl.when(is_first)
        def _(row: int = row, parts: Any = parts) -> None:
            for part, total, normed in parts:
                outputs["sum"][row, part] = total
                outputs["normed"][row, part] = normed.astype(outputs["normed"].dtype)

    return pl.program_id(2) * size


def _of_array(
    inputs: dict[str, Ref], row: int, first: Any, size: int
) -> tuple[list[pl.Slice], list[jax.Array]]:
    """So many columns of a row of y [R, M], in parts."""
    parts = tb.parts(size, rms_norm.BLOCK)
    return parts, [inputs["y"][row, pl.ds(first + part.start, part.size)] for part in parts]


def _of_softmax(
    put_together: Callable[..., list[jax.Array]],
    inputs: dict[str, Ref],
    row: int,
    first: Any,
    size: int,
) -> tuple[list[pl.Slice], list[jax.Array]]:
    """A head of so many channels, in parts; the outputs of attention are parts of a softmax."""
    queries = inputs["sums"].shape[2]
    head = lax.div(first, size)
    return channels(size), put_together(inputs, (row // queries,), (row % queries,), (head,))


def _write_gated(
    read: Callable[..., tuple[list[pl.Slice], list[jax.Array]]],
    options: dict[str, Any],
    group: int,
    gate_start: int,
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    rows: int,
    size: int,
) -> int:
    """Gates and norms the groups of a part, and says where its inputs begin in x [r, K].

    inputs: those of `read`, and of `rms_norm.pallas_triton.gated_and_normed`, of all rows.
    """
    x_ref, first = outputs["x"], pl.program_id(2) * size
    is_shared = "weight" in inputs and inputs["weight"].shape[0] == group
    normed = []
    for row, offset in itertools.product(range(rows), range(0, size, group)):
        place = first + offset
        starts = gate_start + place, 0 if is_shared else place
        parts, values = read(inputs, row, place, group)
        values = [value.astype(x_ref.dtype) for value in values]
        values = rms_norm.gated_and_normed(inputs, values, parts, (row,), *starts, **options)
        normed += [
            (row, pl.ds(offset + part.start, part.size), value)
            for part, value in zip(parts, values, strict=True)
        ]
    for row, part, value in normed:  # behind all loads, which a store would hold up
        x_ref[row, part] = value.astype(x_ref.dtype)
    return 0


def _mask(program: int, size: int, limit: int, axis: int) -> jax.Array | None:
    """Which places of a block exist, on an axis of two; None: all."""
    if limit % size == 0:
        return None
    place = lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
    return pl.program_id(program) * size + place < limit
