"""Reading prompts into a cache, in pieces of bounded size."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Lengths, Tokens
from stree_jax.models.cache import Cache, cache_specs
from stree_jax.models.lm import HybridLM
from stree_jax.partition import ROWS
from stree_jax.sharding import over_mesh

# Longer prompts are read in pieces of this many tokens, which bounds the temporary memory.
PIECE = 512


# A program of its own: it does not depend on the tree, and takes as long to compile as a step.
@functools.partial(jax.jit, static_argnames="max_length")
def prefill(
    model: HybridLM,
    tokens: Tokens,
    lengths: Lengths,
    max_length: int,
    cache: Cache | None = None,
) -> Cache:
    """The cache after the first `lengths` tokens of each right-padded row.

    They follow what `cache` has read, with None nothing.

    Its attention layers have `max_length` places. How many pieces are read is a traced number, so
    padding beyond the longest row's last piece costs nothing.
    """
    if model.partition is None:
        return _prefill(model, tokens, lengths, cache, max_length)
    specs = cache_specs(model.config, model.partition.axis)
    return over_mesh(
        model.partition,
        functools.partial(_prefill, max_length=max_length),
        (model,),
        (tokens, lengths, cache),
        (ROWS, ROWS, None if cache is None else specs),
        specs,
    )


def _prefill(
    model: HybridLM, tokens: Array, lengths: Array, cache: Cache | None, max_length: int
) -> Cache:
    batch, width = tokens.shape
    cache = model.init_cache(batch, max_length) if cache is None else cache
    if width <= PIECE:
        return model.prefill(tokens, lengths, cache)[1]
    tokens = jnp.pad(tokens, ((0, 0), (0, -width % PIECE)))

    def read(index: Array, cache: Cache) -> Cache:
        piece = lax.dynamic_slice_in_dim(tokens, index * PIECE, PIECE, axis=1)
        return model.prefill(piece, jnp.clip(lengths - index * PIECE, 0, PIECE), cache)[1]

    return lax.fori_loop(0, (lengths.max() + PIECE - 1) // PIECE, read, cache)
