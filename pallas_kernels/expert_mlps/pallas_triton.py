"""`expert_mlps` as two Pallas-Triton kernels, one of each matrix.

Passes: the choices of all tokens are sorted by expert. A program handles one expert and one block
of columns: it multiplies the rows that have chosen the expert, one block after the other, finding
them where they are and writing where they belong, so that nothing is gathered, padded or put back
in order. It reads its part of the matrix once for each block of rows, one for a tree mostly; of
experts that nobody has chosen it reads nothing. Rows are read again by each block of columns. The
first kernel also activates, the second gives one row a choice, which XLA weighs and adds up. What
it pays: the rows of the most popular expert come one block after the other.

Numerics: products as `triton.dot` says; activated in float32, then rounded once; the rows
of the choices are rounded, too.

Refuses widths that are not multiples of `SMALLEST_BLOCK`, gelu, and no tokens. Any numbers of
tokens and experts. Has no gradient of its own; see `api.expert_mlps`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.expert_mlps.config import BlockSizes, block_sizes
from pallas_kernels.expert_mlps.xla import by_expert, starts_of, weighted_sum
from pallas_kernels.numerics import activate


def unsupported(width: int, hidden: int, num_choices: int, activation: str) -> str | None:
    """Why these shapes cannot run, or None."""
    if activation == "gelu":
        return "Pallas-Triton has no error function, which gelu needs"
    return (
        tb.unsupported_in_parts("width", width)
        or tb.unsupported_in_parts("hidden size", hidden)
        or (None if num_choices else "there are no tokens")
    )


def expert_mlps(
    x,
    weights,
    chosen,
    experts_in,
    experts_out,
    *,
    activation: str,
    gated: bool,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.expert_mlps`."""
    blocks = blocks or block_sizes(x.dtype)
    sorted_choices = (by_expert(chosen), starts_of(chosen, len(experts_in)))
    product = functools.partial(_product, sorted_choices, blocks=blocks, interpret=interpret)
    hidden = product(x, experts_in, gated=gated, per_row=chosen.shape[1], activation=activation)
    return weighted_sum(product(hidden, experts_out), weights)


def _product(
    sorted_choices,
    rows,
    experts,
    *,
    blocks: BlockSizes,
    interpret: bool,
    per_row: int = 1,
    gated: bool = False,
    activation: str | None = None,
):
    """Of each choice the product of its row and its expert's matrix.

    Args:
        sorted_choices: `by_expert`, and `starts_of`.
        rows: `[choices / per_row, I]`.
        experts: `[experts, I, O]`.
        blocks, interpret: as elsewhere.
        per_row: how many choices one row has.
        gated: whether half of the columns are multiplied by the other half, which are activated.
        activation: what is done with the product; None: nothing.
    """
    order, _ = sorted_choices
    num_experts, inner, num_columns = experts.shape
    if gated:
        num_columns //= 2
    columns = math.gcd(num_columns, blocks.columns)
    num_blocks = num_columns // columns
    average = -(-len(order) // num_experts)

    def whole(array):
        return pl.BlockSpec(array.shape, lambda c, e: (0,) * array.ndim)

    matrices = [pl.BlockSpec((None, inner, columns), lambda c, e: (e, 0, c))]
    if gated:
        matrices.append(pl.BlockSpec((None, inner, columns), lambda c, e: (e, 0, num_blocks + c)))
    return tb.call(
        functools.partial(
            _kernel,
            per_row=per_row,
            activation=activation,
            block_rows=min(blocks.rows, tb.padded_size(average)),
            block_inner=math.gcd(inner, blocks.inner),
        ),
        name="expert_product",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(num_blocks, num_experts),
        in_specs=[*map(whole, sorted_choices), whole(rows), *matrices],
        out_specs=pl.BlockSpec((len(order), columns), lambda c, e: (0, c)),
        out_shape=jax.ShapeDtypeStruct((len(order), num_columns), rows.dtype),
    )(*sorted_choices, rows, *[experts] * len(matrices))


def _kernel(
    order_ref,  # [choices]
    starts_ref,  # [experts + 1]
    rows_ref,  # [choices / per_row, I]
    *refs,  # one matrix, or two, [I, columns]; output [choices, columns]
    per_row: int,
    activation: str | None,
    block_rows: int,
    block_inner: int,
):
    *matrix_refs, output_ref = refs
    inner, columns = matrix_refs[0].shape
    expert = pl.program_id(1)
    start, end = starts_ref[expert], starts_ref[expert + 1]

    def block(i, _):
        place, _ = tb.rows(start + i * block_rows, block_rows, end)
        choice = order_ref[place]
        row = lax.div(choice, per_row)

        def add_part(k, totals):
            part = pl.ds(k * block_inner, block_inner)
            value = rows_ref[row, part]
            return tuple(
                total + tb.dot(value, matrix_ref[part, :])
                for total, matrix_ref in zip(totals, matrix_refs, strict=True)
            )

        nothing = tuple(jnp.zeros((block_rows, columns), jnp.float32) for _ in matrix_refs)
        value, *up = lax.fori_loop(0, inner // block_inner, add_part, nothing)
        if activation is not None:
            value = activate(activation, value)
        for factor in up:
            value = value * factor
        output_ref[choice, :] = value.astype(output_ref.dtype)

    lax.fori_loop(0, lax.div(end - start + block_rows - 1, block_rows), block, None)
