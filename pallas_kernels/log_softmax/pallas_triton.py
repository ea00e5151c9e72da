"""`log_softmax` as two Pallas-Triton kernels.

Passes: a row is cut into parts of `BLOCK` numbers, and a program has one part in both kernels. The
first kernel writes the largest number of each part, and the sum of exponentials relative to it. In
the second each program combines the parts of its row, and writes its part of the result. So a row
is read twice, the second time mostly from cache, and few rows keep all of a GPU at work.

Numerics: float32. The size of a row alone decides its parts, and with them its one order of sums.

Takes rows of any size and number, but none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import native
from pallas_kernels import triton as tb
from pallas_kernels.triton import Ref

BLOCK = 4096  # 32 registers of each of 128 threads; another number is another order of sums
_LEAST = float(jnp.finfo(jnp.float32).min)


@functools.partial(jax.jit, static_argnames="interpret")
def log_softmax(logits: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.log_softmax`."""
    rows = native.rows_of(logits)
    num_rows, size = rows.shape
    block = min(BLOCK, tb.padded_size(size))
    num_parts = pl.cdiv(size, block)
    whole, parts = (pl.BlockSpec((None, n), lambda row, part: (row, 0)) for n in (size, num_parts))
    shape = jax.ShapeDtypeStruct((num_rows, num_parts), jnp.float32)
    options: dict[str, Any] = dict(
        num_warps=4, interpret=interpret, in_one_order=True, grid=shape.shape
    )
    sums = tb.call(
        functools.partial(_sum_kernel, block=block),
        name="log_softmax_sums",
        in_specs=[whole],
        out_specs=[parts] * 2,
        out_shape=[shape] * 2,
        **options,
    )(rows)
    log_probs = tb.call(
        functools.partial(_kernel, block=block),
        name="log_softmax",
        in_specs=[whole, parts, parts],
        out_specs=whole,
        out_shape=jax.typeof(rows),
        **options,
    )(rows, *sums)
    return log_probs.reshape(logits.shape)


def _sum_kernel(
    logits_ref: Ref,  # [V]
    largest_ref: Ref,  # [parts]
    totals_ref: Ref,  # [parts]
    *,
    block: int,
) -> None:
    part = pl.program_id(1)
    index, exists = tb.rows(part * block, block, logits_ref.shape[0])
    logits = jnp.where(exists, logits_ref[index], -jnp.inf)
    largest = jnp.maximum(jnp.max(logits), _LEAST)  # all of a part may be left out
    largest_ref[part], totals_ref[part] = largest, jnp.sum(jnp.exp(logits - largest))


def _kernel(
    logits_ref: Ref,  # [V]
    largest_ref: Ref,  # [parts]
    totals_ref: Ref,  # [parts]
    log_probs_ref: Ref,  # [V]
    *,
    block: int,
) -> None:
    part, exists = tb.rows(0, tb.padded_size(totals_ref.shape[0]), totals_ref.shape[0])
    of_parts = largest_ref[part]
    largest = jnp.max(of_parts)
    totals = jnp.where(exists, totals_ref[part] * jnp.exp(of_parts - largest), 0.0)
    index, _ = tb.rows(pl.program_id(1) * block, block, logits_ref.shape[0])
    log_probs_ref[index] = (logits_ref[index] - largest) - jnp.log(jnp.sum(totals))
