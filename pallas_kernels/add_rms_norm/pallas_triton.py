"""`add_rms_norm` as one Pallas-Triton kernel.

Passes: a program handles one row. It reads stream and output once, holds their sum in registers,
and writes the sum and its norm once: of few rows XLA does it in two kernels, of which the second
reads the sum again. Of an unscaled output it reads the row's parts of the mean square, too.

Numerics: the sum is rounded to the type of the stream, and what was rounded is normed in float32.

Rows are read, and refused, as those of `gated_rms_norm`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.gated_rms_norm.config import BlockSizes, block_sizes
from pallas_kernels.gated_rms_norm.pallas_triton import unsupported
from pallas_kernels.numerics import Unscaled, scaled

__all__ = ["add_rms_norm", "unsupported"]


def add_rms_norm(
    residual,
    output,
    weight,
    *,
    epsilon,
    multiplier,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.add_rms_norm`."""
    size = residual.shape[-1]
    blocks = blocks or block_sizes(size)
    rows = (math.prod(residual.shape[:-1]), size)

    def of_row(length):
        return pl.BlockSpec((None, length), lambda row: (row, 0))

    mean_squares, output_epsilon = [], 0.0
    if isinstance(output, Unscaled):
        mean_squares = [output.mean_squares.reshape(rows[0], -1)]
        output, output_epsilon = output.value, output.epsilon
    sums, normed = tb.call(
        functools.partial(
            _kernel,
            epsilon=epsilon,
            multiplier=multiplier,
            output_epsilon=output_epsilon,
            block=blocks.block,
        ),
        name="add_rms_norm",
        num_warps=blocks.num_warps,
        num_stages=1,
        interpret=interpret,
        grid=rows[:1],
        in_specs=[
            of_row(size),
            of_row(size),
            pl.BlockSpec((size,), lambda row: (0,)),
            *(of_row(parts.shape[1]) for parts in mean_squares),
        ],
        out_specs=(of_row(size), of_row(size)),
        out_shape=(
            jax.ShapeDtypeStruct(rows, residual.dtype),
            jax.ShapeDtypeStruct(rows, output.dtype),
        ),
    )(residual.reshape(rows), output.reshape(rows), weight, *mean_squares)
    return sums.reshape(residual.shape), normed.reshape(output.shape)


def _kernel(
    residual_ref,  # [M] all
    output_ref,
    weight_ref,
    *refs,
    epsilon: float,
    multiplier: float,
    output_epsilon: float,
    block: int,
):
    *mean_squares, sum_ref, normed_ref = refs
    size, kind = residual_ref.shape[0], residual_ref.dtype
    parts = tb.parts(size, block)
    outputs = [output_ref[part] for part in parts]
    for mean_squares_ref in mean_squares:  # of an unscaled output
        output_scale = lax.rsqrt(_total(mean_squares_ref) + output_epsilon)
        outputs = [value.astype(jnp.float32) * output_scale for value in outputs]
    outputs = [scaled(value, multiplier).astype(jnp.float32) for value in outputs]
    sums = [
        (residual_ref[part].astype(jnp.float32) + value).astype(kind)
        for part, value in zip(parts, outputs, strict=True)
    ]
    wide = [value.astype(jnp.float32) for value in sums]
    squares = functools.reduce(jnp.add, [jnp.sum(value * value) for value in wide])
    scale = lax.rsqrt(squares / size + epsilon)
    for part, value, rounded in zip(parts, wide, sums, strict=True):
        sum_ref[part] = rounded
        normed = (value * scale * weight_ref[part].astype(jnp.float32)).astype(kind)
        normed_ref[part] = normed.astype(normed_ref.dtype)


def _total(ref):
    """The sum of any number of parts."""
    count = ref.shape[0]
    part, exists = tb.rows(0, tb.padded_size(count), count)
    return jnp.sum(jnp.where(exists, ref[part], 0.0))
