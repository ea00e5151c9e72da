"""`add_rms_norm` as one Pallas-Triton kernel.

Passes: a program handles one row. It reads stream and output once, holds their sum in registers,
and writes the sum and its norm once: XLA does it in two kernels, of which the second reads the sum
again.

Numerics: the sum is rounded to the type of the stream, and what was rounded is normed in float32.

Rows are read, and refused, as those of `gated_rms_norm`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_backend as tb
from pallas_kernels.gated_rms_norm.config import BlockSizes, block_sizes
from pallas_kernels.gated_rms_norm.pallas_triton import unsupported
from pallas_kernels.numerics import scaled

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
    row = pl.BlockSpec((None, size), lambda row: (row, 0))
    sums, normed = tb.call(
        functools.partial(
            _kernel, epsilon=epsilon, multiplier=multiplier, block=math.gcd(size, blocks.block)
        ),
        name="add_rms_norm",
        num_warps=blocks.num_warps,
        num_stages=1,
        interpret=interpret,
        grid=rows[:1],
        in_specs=[row, row, pl.BlockSpec((size,), lambda row: (0,))],
        out_specs=(row, row),
        out_shape=(
            jax.ShapeDtypeStruct(rows, residual.dtype),
            jax.ShapeDtypeStruct(rows, output.dtype),
        ),
    )(residual.reshape(rows), output.reshape(rows), weight)
    return sums.reshape(residual.shape), normed.reshape(output.shape)


def _kernel(
    residual_ref,  # [M] all
    output_ref,
    weight_ref,
    sum_ref,
    normed_ref,
    *,
    epsilon: float,
    multiplier: float,
    block: int,
):
    size, kind = residual_ref.shape[0], residual_ref.dtype
    parts = [pl.ds(start, block) for start in range(0, size, block)]
    sums = [
        residual_ref[part].astype(jnp.float32)
        + scaled(output_ref[part], multiplier).astype(jnp.float32)
        for part in parts
    ]
    sums = [value.astype(kind) for value in sums]
    wide = [value.astype(jnp.float32) for value in sums]
    squares = functools.reduce(jnp.add, [jnp.sum(value * value) for value in wide])
    scale = lax.rsqrt(squares / size + epsilon)
    for part, value, rounded in zip(parts, wide, sums, strict=True):
        sum_ref[part] = rounded
        normed = (value * scale * weight_ref[part].astype(jnp.float32)).astype(kind)
        normed_ref[part] = normed.astype(normed_ref.dtype)
