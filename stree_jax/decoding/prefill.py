"""Chunked prefill: the cache of a prompt, with bounded temporary memory."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.array_types import Array, Lengths, Tokens
from stree_jax.models.cache import Cache, cache_specs
from stree_jax.models.lm import HybridLM
from stree_jax.partition import ROWS
from stree_jax.sharding import over_mesh

PREFILL_CHUNK = 512  # tokens


# A separate program: it does not depend on the tree, and takes as long to compile as a step.
@functools.partial(jax.jit, static_argnames="max_length")
def prefill(
    model: HybridLM,
    tokens: Tokens,
    lengths: Lengths,
    max_length: int,
    cache: Cache | None = None,
) -> Cache:
    """The cache after the first `lengths` tokens of each right-padded row.

    Continues from `cache`; None starts with an empty one of `max_length` positions. The number of
    chunks is traced, so chunks beyond the longest row cost nothing.
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
    if width <= PREFILL_CHUNK:
        return model.prefill(tokens, lengths, cache)[1]
    tokens = jnp.pad(tokens, ((0, 0), (0, -width % PREFILL_CHUNK)))

    def one_chunk(index: Array, cache: Cache) -> Cache:
        start = index * PREFILL_CHUNK
        chunk = lax.dynamic_slice_in_dim(tokens, start, PREFILL_CHUNK, axis=1)
        return model.prefill(chunk, jnp.clip(lengths - start, 0, PREFILL_CHUNK), cache)[1]

    num_chunks = (lengths.max() + PREFILL_CHUNK - 1) // PREFILL_CHUNK
    return lax.fori_loop(0, num_chunks, one_chunk, cache)
