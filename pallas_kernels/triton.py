"""The one module that imports Pallas-Triton.

JAX has announced that it will remove this backend. When it does, `UNAVAILABLE` says so, `dispatch`
falls back to XLA, and nothing else has to know.

What the backend asks of a kernel (jax 0.10.2 to 0.12.0.1, found by lowering): sizes of loaded and
stored blocks are powers of two (a ref may have any size: see `rows`); blocks divide their arrays,
or loads run out of bounds; both operands of a `dot` have one type; no reverse cumsum, no gather
from values, no slices of values. The interpreter has no masked stores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

UNAVAILABLE: str | None = None
try:
    from jax.experimental.pallas import triton as plt
except ImportError as error:  # pragma: no cover - no jax that we support
    UNAVAILABLE = f"this jax ({jax.__version__}) has no Pallas-Triton backend: {error}"

# A dot's operands have at least this many rows and columns.
SMALLEST_BLOCK = 16


def call(kernel, *, name: str, num_warps: int, num_stages: int, interpret: bool, **spec):
    """`pl.pallas_call` on the Triton route, which jax 0.10 takes only if told by its parameters."""
    return pl.pallas_call(
        kernel,
        name=name,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        **spec,
    )


def call_by_name(kernel, inputs: dict, outputs: dict, *, in_place: dict[str, str], **options):
    """`call` of a kernel that takes a dict of input refs and one of output refs.

    Args:
        kernel: what is called.
        inputs, outputs: by name, an array and its block; of outputs the shape and type count.
        in_place: by the name of an input that of the output which takes its memory.
        options: those of `call`.

    Returns:
        The outputs by name.
    """
    # Jax flattens dicts in the order of their keys.
    order, new_order = sorted(inputs), sorted(outputs)
    return call(
        kernel,
        in_specs=[{name: block for name, (_, block) in inputs.items()}],
        out_specs={name: block for name, (_, block) in outputs.items()},
        out_shape={
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, (array, _) in outputs.items()
        },
        input_output_aliases={
            order.index(name): new_order.index(new) for name, new in in_place.items()
        },
        **options,
    )({name: array for name, (array, _) in inputs.items()})


def dot(left, right, *, trans_a: bool = False, trans_b: bool = False) -> jax.Array:
    """A product in float32 accuracy, accumulated in float32, on tensor cores.

    The default for float32 operands on GPU is TF32 (1e-3). Instead float32 operands are split into
    bf16 parts, each the rounding error of those before, whose products are exact before
    accumulation:
    bf16 x bf16: one product.
    bf16 x f32: two parts; error 2^-16.
    f32 x f32: three parts, all products but those below float32's own rounding; error 2^-23. (Full
    float32 multiplications would bypass the tensor cores, and spill.)
    """
    product = functools.partial(plt.dot, trans_a=trans_a, trans_b=trans_b)
    count = 3 if left.dtype == right.dtype == jnp.float32 else 2
    lefts, rights = _bf16_parts(left, count), _bf16_parts(right, count)
    # Smallest first: nothing is lost in adding them up.
    order = [(i, j) for i in range(len(lefts)) for j in range(len(rights)) if i + j < count]
    products = [product(lefts[i], rights[j]) for i, j in sorted(order, key=sum, reverse=True)]
    return functools.reduce(jnp.add, products)


def _bf16_parts(value, count):
    if value.dtype == jnp.bfloat16:
        return [value]
    parts = []
    for _ in range(count):
        parts.append(value.astype(jnp.bfloat16))
        value = value - parts[-1].astype(jnp.float32)
    return parts


def masked_load(ref: Any, index: tuple[Any, ...], mask: jax.Array, *, interpret: bool) -> jax.Array:
    """`ref[index]` where `mask`, 0 elsewhere; what is masked off is not read.

    The interpreter has no masked loads, and reads all. The index must be in bounds everywhere.
    """
    if interpret:
        value = ref[index]
        return jnp.where(mask, value, jnp.zeros_like(value))
    view = ref.at[index]
    return plt.load(view, mask=jnp.broadcast_to(mask, view.shape), other=0.0)


def barrier(interpret: bool) -> None:
    """The program's threads wait for each other, and see what each wrote to memory before."""
    if not interpret:
        plt.debug_barrier()


def padded_size(size: int) -> int:
    """The power of two, at least `SMALLEST_BLOCK`, that a kernel holds `size` rows in."""
    return max(SMALLEST_BLOCK, 1 << (size - 1).bit_length())


def parts(size: int, most: int) -> list[pl.Slice]:
    """`range(size)` in slices of powers of two, the largest first; none is larger than `most`, one.

    Worked example, `parts(2688, 4096)`: 2048, 512 and 128 numbers.
    """
    slices, start = [], 0
    while start < size:
        length = min(most, 1 << ((size - start).bit_length() - 1))
        slices.append(pl.Slice(start, length))
        start += length
    return slices


def rows(first, count: int, limit: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row indices `first, ..., first + count - 1` and which of them exist, that is, are `< limit`.

    Where a row does not exist its index is that of the last row. So any number of rows is read in
    blocks of a power of two, nothing is padded outside of the kernel, and nothing is read or
    written out of bounds. Worked example, `limit = 13`, block of 16:
        index    0 1 2 ... 11 12 12 12 12
        exists   1 1 1 ...  1  1  0  0  0
    What is *summed over* must be masked by `exists`. What is *computed for* such a row is the last
    row's result once more, and storing it again is harmless.
    """
    row = first + lax.broadcasted_iota(jnp.int32, (count,), 0)
    if isinstance(limit, int) and limit % count == 0:  # keeps the row numbers contiguous for Triton
        return row, row < limit
    return jnp.minimum(row, limit - 1), row < limit


def unsupported_size(name: str, size: int) -> str | None:
    """Why a kernel cannot take this size, or None if it can."""
    if size >= SMALLEST_BLOCK and size & (size - 1) == 0:
        return None
    return f"{name} = {size} is not a power of two of at least {SMALLEST_BLOCK}"


def unsupported_in_parts(name: str, size: int) -> str | None:
    """Why a kernel cannot take this size as a few blocks, or None if it can."""
    if size % SMALLEST_BLOCK == 0:
        return None
    return f"{name} = {size} is not a multiple of {SMALLEST_BLOCK}"
