"""`log_softmax` as one Pallas-Triton kernel.

Passes: a program has a row, and reads it block by block: for its largest number, for the sum of
exponentials relative to it, and to write the result. The second and third time it is read from
cache. Few rows leave most of a GPU idle. Log-probabilities are computed only where they are asked
for, and a row of 250,000 logits has 1 MB.

Numerics: float32. The size of a row alone decides its blocks, and with them its one order of sums.

Takes rows of any size and number, but none.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import native
from pallas_kernels import triton as tb
from pallas_kernels.triton import Ref

BLOCK = 4096  # 16 registers of each of 256 threads; another number is another order of sums


@functools.partial(jax.jit, static_argnames="interpret")
def log_softmax(logits: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.log_softmax`."""
    rows = native.rows_of(logits)
    row = pl.BlockSpec((None, rows.shape[1]), lambda row: (row, 0))
    log_probs = tb.call(
        _kernel,
        name="log_softmax",
        num_warps=8,
        interpret=interpret,
        in_one_order=True,
        grid=rows.shape[:1],
        in_specs=[row],
        out_specs=row,
        out_shape=jax.typeof(rows),
    )(rows)
    return log_probs.reshape(logits.shape)


def _kernel(
    logits_ref: Ref,  # [V]
    log_probs_ref: Ref,  # [V]
) -> None:
    size = logits_ref.shape[0]
    block = min(BLOCK, tb.padded_size(size))

    def over_blocks(step: Callable[[jax.Array, jax.Array, Any], Any], start: Any) -> Any:
        """Folds a function of the places and logits of each block, and of what came before."""

        def of_block(i: jax.Array, before: Any) -> Any:
            index, exists = tb.rows(i * block, block, size)
            return step(index, jnp.where(exists, logits_ref[index], -jnp.inf), before)

        return lax.fori_loop(0, pl.cdiv(size, block), of_block, start)

    def write(index: jax.Array, logits: jax.Array, _: None) -> None:
        log_probs_ref[index] = logits_ref[index] - largest - jnp.log(total)

    # All of a block may be left out.
    least = jnp.float32(jnp.finfo(jnp.float32).min)
    largest = over_blocks(lambda _, logits, most: jnp.maximum(most, jnp.max(logits)), least)
    total = over_blocks(
        lambda _, logits, total: total + jnp.sum(jnp.exp(logits - largest)), jnp.float32(0)
    )
    over_blocks(write, None)
