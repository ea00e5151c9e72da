"""`expert_mlps` as two Pallas-Triton kernels, one for each matrix of an expert.

Passes: the choices of all tokens are sorted by expert. A program handles one expert and one block
of columns. It multiplies the rows that have chosen the expert, block by block, reading them where
they are and writing the results where they belong: nothing is gathered, padded or sorted back. It
reads its part of the matrix once for each block of rows (for a tree mostly one), and nothing of an
expert that nobody has chosen. Each block of columns reads the rows again. The first kernel also
applies the activation. The second writes one row for each choice, and XLA computes the weighted
sum. The blocks of rows of one expert are sequential, so the most popular expert sets the time.

Numerics: products as `triton.dot` says, with the contracted channels in one order; activated in
float32, then rounded once. The rows of the choices are rounded too, before their sum.

Refuses widths that are not multiples of `SMALLEST_BLOCK`, gelu, and no tokens. Any number of tokens
and experts. Derivatives are XLA's; see `api.expert_mlps`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import triton as tb
from pallas_kernels.moe.xla import by_expert, starts_of, weighted_sum
from pallas_kernels.numerics import activate, product_within
from pallas_kernels.triton import Ref


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on."""

    rows: int  # tokens of one expert per block; fewer if experts get fewer on average
    columns: int  # output columns per block; reduced to a divisor of their number
    inner: int  # contracted channels per partial product; reduced to a divisor of their number
    num_stages: int  # Triton's


# By dtype of the inputs. Full float32 products need many registers. With these nothing spills on
# sm_80 to sm_90 (`benchmarks/results/spills.json`).
DEFAULTS = {
    "bfloat16": BlockSizes(rows=64, columns=64, inner=64, num_stages=3),
    "float32": BlockSizes(rows=16, columns=32, inner=32, num_stages=2),
}


def unsupported(width: int, hidden: int, num_choices: int, activation: str) -> str | None:
    """Why these shapes cannot run, or None."""
    if activation == "gelu":
        return "Pallas-Triton has no error function, which gelu needs"
    return (
        tb.unsupported_in_parts("width", width)
        or tb.unsupported_in_parts("hidden size", hidden)
        or (None if num_choices else "there are no tokens")
    )


@functools.partial(jax.jit, static_argnames=("activation", "gated", "limit", "interpret", "blocks"))
def expert_mlps(
    *arrays: Array,
    activation: str,
    gated: bool,
    limit: float | None = None,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> Float[Array, "tokens M"]:
    """See `api.expert_mlps`, whose arrays these are; `blocks` None: `DEFAULTS`."""
    x, weights, chosen, experts_in, experts_out = arrays
    blocks = blocks or DEFAULTS[tb.dtype_case(x.dtype)]
    sorted_choices = (by_expert(chosen), starts_of(chosen, len(experts_in)))
    product = functools.partial(_product, sorted_choices, blocks=blocks, interpret=interpret)

    def activated(value: Array, up: Array | None = None) -> Array:
        value = activate(activation, value)
        return value if up is None else product_within(value, up, limit)

    hidden = product(x, experts_in, gated=gated, per_row=chosen.shape[1], combine=activated)
    return weighted_sum(product(hidden, experts_out), weights)


def _product(
    sorted_choices: tuple[Int[Array, " choices"], Int[Array, " starts"]],
    rows: Float[Array, "rows inner"],
    experts: Float[Array, "experts inner columns"],
    *,
    blocks: BlockSizes,
    interpret: bool,
    per_row: int = 1,
    gated: bool = False,
    combine: Callable[..., Array] = lambda value: value,
) -> jax.Array:
    """The product of each choice `[choices, columns]`: its row times its expert's matrix.

    A row is of `per_row` choices. `combine` gets the product, or both its halves if it is gated.
    """
    order, _ = sorted_choices
    num_experts, inner, num_columns = experts.shape
    if gated:
        num_columns //= 2
    columns = math.gcd(num_columns, blocks.columns)
    num_blocks = num_columns // columns
    average = -(-len(order) // num_experts)

    def from_block(first: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, inner, columns), lambda c, e: (e, 0, first + c))

    matrices = [from_block(0), from_block(num_blocks)][: 1 + gated]
    arrays = *sorted_choices, rows
    return tb.call(
        functools.partial(
            _kernel,
            per_row=per_row,
            combine=combine,
            block_rows=min(blocks.rows, tb.padded_size(average)),
            block_inner=math.gcd(inner, blocks.inner),
        ),
        name="expert_product",
        num_warps=4,
        num_stages=blocks.num_stages,
        interpret=interpret,
        in_one_order=True,
        grid=(num_blocks, num_experts),
        in_specs=[*(tb.blocked(x, ".."[: x.ndim], "ce")[1] for x in arrays), *matrices],
        out_specs=pl.BlockSpec((len(order), columns), lambda c, e: (0, c)),
        out_shape=jax.ShapeDtypeStruct((len(order), num_columns), rows.dtype),
    )(*arrays, *[experts] * len(matrices))


def _kernel(
    order_ref: Ref,  # [choices]
    starts_ref: Ref,  # [experts + 1]
    rows_ref: Ref,  # [choices / per_row, inner]
    *refs: Ref,  # one matrix, or two, [inner, columns]; output [choices, columns]
    per_row: int,
    combine: Callable[..., Array],
    block_rows: int,
    block_inner: int,
) -> None:
    *matrix_refs, output_ref = refs
    inner, columns = matrix_refs[0].shape
    expert = pl.program_id(1)
    start, end = starts_ref[expert], starts_ref[expert + 1]

    def multiply_block(i: jax.Array, _: Any) -> None:
        place, _ = tb.rows(start + i * block_rows, block_rows, end)
        choice = order_ref[place]
        row = lax.div(choice, per_row)

        def add_part(k: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            part = pl.ds(k * block_inner, block_inner)
            value = rows_ref[row, part]
            return tuple(
                total + tb.dot(value, matrix_ref[part, :])
                for total, matrix_ref in zip(totals, matrix_refs, strict=True)
            )

        nothing = tuple(jnp.zeros((block_rows, columns), jnp.float32) for _ in matrix_refs)
        value = combine(*lax.fori_loop(0, inner // block_inner, add_part, nothing))
        output_ref[choice, :] = value.astype(output_ref.dtype)

    lax.fori_loop(0, lax.div(end - start + block_rows - 1, block_rows), multiply_block, None)
