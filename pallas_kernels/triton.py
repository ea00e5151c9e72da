"""The one module that imports Pallas-Triton.

JAX has announced that it will remove this backend. When it does, `UNAVAILABLE` says so, `dispatch`
falls back to XLA; no other module has to know.

Constraints of the backend (jax 0.10.2 to 0.12.0.1, found by lowering): sizes of loaded and stored
blocks are powers of two (a ref may have any size: see `rows`); blocks divide their arrays, or loads
run out of bounds; both operands of a `dot` have one dtype; no reverse cumsum, no gather from
values, no slices of values. The interpreter has no masked stores.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.numerics import PartialSums, added_in_pairs, rounded

UNAVAILABLE: str | None = None
try:
    from jax.experimental.pallas import triton as plt
except ImportError as error:  # pragma: no cover - no jax that we support
    UNAVAILABLE = f"this jax ({jax.__version__}) has no Pallas-Triton backend: {error}"

# A kernel's view of a block of an array; the comment after the annotation is its shape. A capital
# letter is a whole axis, a small letter a block of that axis.
Ref: TypeAlias = Any

# A dot's operands have at least this many rows and columns.
SMALLEST_BLOCK = 16

# What all programs of a kernel read again, rather than have a launch of its own compute it once: by
# arithmetic a microsecond of the L2 cache. A launch took 3 to 4 on an H200. Nobody has timed both.
MOST_REPEATED_BYTES = 6 << 20

# Names of kernels that add up a row in one order, whatever the tree and the other rows are.
IN_ONE_ORDER: set[str] = set()


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    num_warps: int,
    num_stages: int = 1,
    interpret: bool,
    in_one_order: bool = False,
    **spec: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call` with the Triton parameters, without which jax 0.10 picks Mosaic.

    A kernel with a name is `in_one_order` in all its calls, or in none: see `IN_ONE_ORDER`.

    Ops wrap the function that calls this in `jax.jit` with its options static: a model of many
    layers then traces and lowers each kernel once. XLA inlines the calls, so the compiled program
    is the same.
    """
    if in_one_order:
        IN_ONE_ORDER.add(name)
    program = pl.pallas_call(
        kernel,
        name=name,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        **spec,
    )

    def run(*arrays: Any) -> Any:
        with jax.enable_x64(False):  # a kernel's indices have 32 bits
            return program(*arrays)

    return run


def call_by_name(
    kernel: Callable[..., None],
    inputs: dict[str, tuple[Any, pl.BlockSpec]],
    outputs: dict[str, tuple[Any, pl.BlockSpec]],
    **options: Any,
) -> dict[str, Array]:
    """`call` of a kernel that takes dicts of input and of output refs.

    An output that is the very pair of the input with its name is written in place. Of an input of
    `PartialSums` the kernel reads the product, see `SummedRef`.
    """
    sums = {name: a.dtype for name, (a, _) in inputs.items() if isinstance(a, PartialSums)}

    def with_sums(refs: dict[str, Ref], output_refs: dict[str, Ref]) -> None:
        summed = {name: SummedRef(refs[name], dtype) for name, dtype in sums.items()}
        kernel(refs | summed, output_refs)

    # jax flattens dicts in the order of their keys.
    order, new_order = sorted(inputs), sorted(outputs)
    return call(
        with_sums,
        in_specs=[{name: block for name, (_, block) in inputs.items()}],
        out_specs={name: block for name, (_, block) in outputs.items()},
        out_shape={
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, (array, _) in outputs.items()
        },
        input_output_aliases={
            order.index(name): new_order.index(name)
            for name, pair in inputs.items()
            if outputs.get(name) is pair
        },
        **options,
    )({name: array.parts if name in sums else array for name, (array, _) in inputs.items()})


@dataclasses.dataclass(frozen=True)
class SummedRef:
    """A product whose parts are added up where it is read: a ref that cannot be written."""

    parts: Ref  # [P, *shape]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return self.parts.shape[1:]

    def __getitem__(self, index: Any) -> Array:
        return self.total(
            lambda part: self.parts[part, *(index if type(index) is tuple else (index,))]
        )

    def total(self, load: Callable[[int], Array]) -> Array:
        """The sum of what is loaded from all parts, rounded."""
        count = self.parts.shape[0]
        return added_in_pairs([load(part) for part in range(count)]).astype(self.dtype)


def blocked(array: Any, axes: str, grid: str) -> tuple[Any, pl.BlockSpec]:
    """An array and a program's block: one place on axes that the grid has too, all of the others.

    `axes` and `grid` have a letter for each axis. A program has all parts of `PartialSums`.
    """
    if isinstance(array, PartialSums):
        return array, blocked(array.parts, "+" + axes, grid)[1]
    return array, pl.BlockSpec(
        tuple(None if axis in grid else size for axis, size in zip(axes, array.shape, strict=True)),
        lambda *program: tuple(program[grid.index(axis)] if axis in grid else 0 for axis in axes),
    )


def dot(
    left: Array,
    right: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    exact: bool = False,
) -> Array:
    """A product with float32 accuracy and float32 accumulation, on tensor cores.

    The default for float32 operands on GPU is TF32 (error 1e-3). Instead a float32 operand is split
    into bf16 parts, each the rounding error of the sum of those before. Products of parts are exact
    before accumulation:
        bf16 x bf16  one product.
        bf16 x f32   two parts; error 2^-16. If `exact` three; error 2^-24.
        f32 x f32    three parts, without the products below float32's own rounding; error 2^-23.
    (True float32 multiplications would bypass the tensor cores, and spill.)
    """
    product = functools.partial(plt.dot, trans_a=trans_a, trans_b=trans_b)
    count = 3 if exact or left.dtype == right.dtype == jnp.float32 else 2
    lefts, rights = _bf16_parts(left, count), _bf16_parts(right, count)
    # Smallest first, which loses least in the sum.
    order = [(i, j) for i in range(len(lefts)) for j in range(len(rights)) if i + j < count]
    products = [product(lefts[i], rights[j]) for i, j in sorted(order, key=sum, reverse=True)]
    return functools.reduce(jnp.add, products)


def _bf16_parts(value: Array, count: int) -> list[Array]:
    if value.dtype == jnp.bfloat16:
        return [value]
    parts = []
    for _ in range(count):
        parts.append(value.astype(jnp.bfloat16))
        value = value - parts[-1].astype(jnp.float32)
    return parts


def masked_load(ref: Ref, index: tuple[Any, ...], mask: Array | None, *, interpret: bool) -> Array:
    """`ref[index]` where `mask`, 0 elsewhere; what is masked off is not read. None: everywhere.

    The interpreter has no masked loads, and reads all. The index must be in bounds everywhere; the
    interpreter pads what a block has beyond the last row.
    """
    if isinstance(ref, SummedRef):
        return ref.total(
            lambda part: masked_load(ref.parts, (part, *index), mask, interpret=interpret)
        )
    if interpret or mask is None:
        value = ref[index]
        return value if mask is None else jnp.where(mask, value, jnp.zeros_like(value))
    view = ref.at[index]
    return plt.load(view, mask=jnp.broadcast_to(mask, view.shape), other=0.0)


def masked_store(ref: Ref, value: Array, masks: Sequence[Array | None], *, interpret: bool) -> None:
    """Writes a whole block where all masks are true; None is everywhere.

    The interpreter has no masked stores: it writes all, and drops what is beyond the last row.
    """
    some = [jnp.broadcast_to(mask, value.shape) for mask in masks if mask is not None]
    if interpret or not some:
        ref[...] = value
        return
    plt.store(ref.at[...], value, mask=functools.reduce(jnp.logical_and, some))


def add_product(
    total: Array, left: Array, right: Array, *, trans_a: bool, interpret: bool
) -> Array:
    """`total + left @ right.T` of bfloat16, by matrix units, which add in the order of the inputs.

    The interpreter adds one input after the other: the order of XLA's own product depends on its
    shape. Products are exact in float32, so nothing hangs on whether a compiler fuses them.
    """
    if not interpret:
        return total + plt.dot(left, right, trans_a=trans_a, trans_b=True)

    def add(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        column, row = (vector.astype(jnp.float32) for vector in pair)
        return total + column[:, None] * row[None, :], None

    return lax.scan(add, total, (left if trans_a else left.T, right.T))[0]


def multiply_add(
    left: Array, right: Array, addend: Array | None = None, *, interpret: bool
) -> Array:
    """`left * right + addend` of float32, rounded once; without an addend the rounded product.

    A compiler that fuses, or does not, has no say here. The interpreter rounds the product too, in
    all kernels alike.
    """
    if interpret:
        product = rounded(left * right)
        return product if addend is None else product + addend
    if addend is None:
        return _elementwise("mul.rn.f32 $0, $1, $2;", left, right)
    return _elementwise("fma.rn.f32 $0, $1, $2, $3;", left, right, addend)


def laid_out_as(like: Array, value: Array, *, interpret: bool) -> Array:
    """A float32 `value`, broadcast to the shape of `like`, with its numbers in the same threads.

    So sums of its products along an axis are added in the order of those of `like`. In a layout of
    its own, Triton would load it twice.
    """
    if interpret:
        return jnp.broadcast_to(value, like.shape)
    return _elementwise("mov.b32 $0, $1;", value, like)


def _elementwise(code: str, *operands: Array) -> Array:
    """An instruction of PTX for all numbers of broadcast float32 operands."""
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    (result,) = plt.elementwise_inline_asm(
        code,
        args=[jnp.broadcast_to(operand, shape) for operand in operands],
        constraints="=f" + ",f" * len(operands),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result


def barrier(interpret: bool) -> None:
    """Synchronises the threads of a program, including their writes to memory."""
    if not interpret:
        plt.debug_barrier()


def padded_size(size: int) -> int:
    """The power of two, at least `SMALLEST_BLOCK`, that fits `size` rows."""
    return max(SMALLEST_BLOCK, 1 << (size - 1).bit_length())


def parts(size: int, most: int) -> list[pl.Slice]:
    """`range(size)` in slices of powers of two up to `most`, itself one; the largest first.

    Worked example, `parts(2688, 4096)`: 2048, 512 and 128 numbers.
    """
    slices, start = [], 0
    while start < size:
        length = min(most, 1 << ((size - start).bit_length() - 1))
        slices.append(pl.Slice(start, length))
        start += length
    return slices


def rows(first: int | Array, count: int, limit: int | Array) -> tuple[Array, Array]:
    """Row indices `first, ..., first + count - 1` and which of them exist, that is, are `< limit`.

    A row that does not exist gets the index of the last row. So a kernel reads any number of
    rows in blocks of a power of two, without padded arrays and within bounds. Worked example,
    `limit = 13`, block of 16:
        index    0 1 2 ... 11 12 12 12 12
        exists   1 1 1 ...  1  1  0  0  0
    A *sum over* rows must mask by `exists`. A result *for* a row that does not exist is the last
    row's result again, and storing that twice is harmless.
    """
    row = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
    if isinstance(limit, int) and limit % count == 0:  # keeps the row numbers contiguous for Triton
        return row, row < limit
    return jnp.minimum(row, limit - 1), row < limit


def unsupported_in_parts(name: str, size: int) -> str | None:
    """Why a kernel cannot take this size in parts (see `parts`), or None if it can."""
    if size % SMALLEST_BLOCK == 0:
        return None
    return f"{name} = {size} is not a multiple of {SMALLEST_BLOCK}"


def dtype_case(dtype: DTypeLike) -> str:
    """Names the case of block sizes that depend on the type of the inputs."""
    return "float32" if jnp.dtype(dtype) == jnp.float32 else "bfloat16"


def unsupported_state(
    head_dim: int, state_size: int, dtype: DTypeLike, most: Mapping[str, int]
) -> str | None:
    """Why a kernel cannot take heads with such states, or None; `most` has its limits by type."""
    case = dtype_case(dtype)
    if state_size > most[case]:
        return f"state_size = {state_size} of {case} inputs is more than {most[case]}"
    for name, size in (("head_dim", head_dim), ("state_size", state_size)):
        if size < SMALLEST_BLOCK or size & (size - 1):
            return f"{name} = {size} is not a power of two of at least {SMALLEST_BLOCK}"
    return None
