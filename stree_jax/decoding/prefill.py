"""Reading prompts into a cache, in pieces of bounded size."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Lengths, Tokens
from stree_jax.models.cache import Cache
from stree_jax.models.lm import HybridLM

# Longer prompts are read in pieces of this many tokens, so that memory does not grow with their
# length.
PIECE = 512


# Compiled by itself: it does not depend on the tree, and takes as long to compile as a step.
@functools.partial(jax.jit, static_argnames="max_length")
def prefill(model: HybridLM, tokens: Tokens, lengths: Lengths, max_length: int) -> Cache:
    """The cache after the first `lengths` tokens of each right-padded row.

    It has places for `max_length` tokens.
    """
    batch, width = tokens.shape
    cache = model.init_cache(batch, max_length)
    if width <= PIECE:
        return model.prefill(tokens, lengths, cache)[1]
    pieces = jnp.pad(tokens, ((0, 0), (0, -width % PIECE))).reshape(batch, -1, PIECE).swapaxes(0, 1)

    def read(cache: Cache, piece: tuple) -> tuple[Cache, None]:
        index, tokens = piece
        here = jnp.clip(lengths - index * PIECE, 0, PIECE)
        return model.prefill(tokens, here, cache)[1], None

    cache, _ = lax.scan(read, cache, (jnp.arange(len(pieces)), pieces))
    return cache
