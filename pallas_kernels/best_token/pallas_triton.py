"""`best_token` as one Pallas-Triton kernel: a matrix product that keeps one number of many.

Passes: a program multiplies a block of rows with a block of words, and writes for each row the best
of these words and its logit. So the head is read once, what is written is a share of `1 / words` of
the logits, and XLA finds the best of the blocks. Blocks of rows are the faster axis of the grid:
those of one block of words run side by side, and all but the first find it in the L2 cache.

Numerics: products as `triton.dot` says, by which infinite float32 operands give NaN. A NaN
counts as +inf, so that it is seen.

Refuses widths that are not multiples of `SMALLEST_BLOCK`, and no rows at all. Any number of words.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.best_token.config import BlockSizes, block_sizes
from pallas_kernels.best_token.xla import Best


def unsupported(shape: tuple[int, ...]) -> str | None:
    """Why rows of this shape cannot run, or None."""
    *rows, width = shape
    no_rows = None if math.prod(rows) else "there are no rows"
    return tb.unsupported_in_parts("width", width) or no_rows


def best_token(
    hidden, head, vocab_size, multiplier, *, interpret=False, blocks: BlockSizes | None = None
):
    """See `api.best_token`."""
    blocks = blocks or block_sizes(hidden.dtype)
    *shape, width = hidden.shape
    hidden = hidden.reshape(-1, width)
    num_rows = hidden.shape[0]
    num_blocks = pl.cdiv(vocab_size, blocks.words)
    block_rows = min(blocks.rows, tb.padded_size(num_rows))

    def whole(array):
        return pl.BlockSpec(array.shape, lambda r, v: (0, 0))

    of_block = pl.BlockSpec((num_rows, None), lambda r, v: (0, v))
    best_of_blocks = tb.call(
        functools.partial(
            _kernel,
            vocab_size=vocab_size,
            multiplier=multiplier,
            block_rows=block_rows,
            block_words=blocks.words,
            block_inner=math.gcd(width, blocks.inner),
        ),
        name="best_token",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(pl.cdiv(num_rows, block_rows), num_blocks),
        in_specs=[whole(hidden), whole(head)],
        out_specs=(of_block, of_block),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, num_blocks), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, num_blocks), jnp.float32),
        ),
    )(hidden, head)
    nothing = (jnp.int32(vocab_size), jnp.float32(-jnp.inf))
    token, logit = lax.reduce(best_of_blocks, nothing, _better, (1,))
    return Best(token.reshape(shape), logit.reshape(shape))


def _better(one, other):
    """The pair of token and logit with the larger logit; of equals the lower token."""
    is_one = (one[1] > other[1]) | ((one[1] == other[1]) & (one[0] < other[0]))
    return tuple(jnp.where(is_one, mine, theirs) for mine, theirs in zip(one, other, strict=True))


def _kernel(
    hidden_ref,  # [R, M]
    head_ref,  # [W, M]
    token_ref,  # [R]
    logit_ref,  # [R]
    *,
    vocab_size: int,
    multiplier: float,
    block_rows: int,
    block_words: int,
    block_inner: int,
):
    num_rows, width = hidden_ref.shape
    row, _ = tb.rows(pl.program_id(0) * block_rows, block_rows, num_rows)
    # Beyond the last word is the last word once more, which changes nothing.
    word, _ = tb.rows(pl.program_id(1) * block_words, block_words, vocab_size)

    def from_part(k, total):
        part = pl.ds(k * block_inner, block_inner)
        return total + tb.dot(hidden_ref[row, part], head_ref[word, part], trans_b=True)

    logits = jnp.zeros((block_rows, block_words), jnp.float32)
    logits = lax.fori_loop(0, width // block_inner, from_part, logits) * multiplier
    logits = jnp.where(logits == logits, logits, jnp.inf)
    best = jnp.max(logits, axis=1)
    token = jnp.where(logits == best[:, None], word[None, :], vocab_size)
    token_ref[row] = jnp.min(token, axis=1)
    logit_ref[row] = best
