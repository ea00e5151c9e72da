"""Chunked prefill: the cache of a prompt, with bounded temporary memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Int, Lengths, Tokens
from stree_jax.decoding.prompts import Context, buffer_size
from stree_jax.decoding.traced_checks import check_like
from stree_jax.mesh.hosts import on_host
from stree_jax.mesh.partition import ROWS
from stree_jax.mesh.programs import on_mesh
from stree_jax.mesh.rows import placed_like
from stree_jax.models.cache import Cache, cache_specs
from stree_jax.models.lm import HybridLM

PREFILL_CHUNK = 512  # tokens


def _specs(model: HybridLM) -> Any:
    specs = cache_specs(model.config, model.partition.axis)
    return (ROWS, ROWS, ROWS, specs), (specs, ROWS)


def prefill(
    model: HybridLM,
    tokens: Tokens,
    lengths: Lengths,
    max_length: int | None = None,
    cache: Cache | None = None,
) -> Cache:
    """The cache after the first `lengths` tokens of each right-padded row.

    Continues from `cache`; None starts with an empty one of `max_length` positions. The number of
    chunks is traced, so chunks beyond the longest row cost nothing.
    """
    return prefill_with_drafter(
        model, None, tokens, lengths, None, cache, inner_layers=(), max_length=max_length
    )[0]


# A separate program: it does not depend on the tree, and takes as long to compile as a step.
@functools.partial(jax.jit, static_argnames=("inner_layers", "max_length"))
@on_mesh(_specs)
def prefill_with_drafter(
    model: HybridLM,
    drafter: Any,
    tokens: Tokens,
    lengths: Lengths,
    state: Any,
    cache: Cache | None,
    *,
    inner_layers: tuple[int, ...],
    max_length: int | None,
) -> tuple[Cache, Any]:
    """As `prefill`, and the state of a drafter that reads every chunk, see `Drafter.read`."""

    def read(chunk: Array, lengths: Array, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        cache, state = carry
        if drafter is None:
            return model.prefill(chunk, lengths, cache)[1], state
        hidden, cache = model.prefill_hidden(chunk, lengths, cache, inner_layers)
        after = drafter.read(state, chunk, hidden, lengths)
        return cache, check_like(f"{type(drafter).__name__}.read: state", after, state)

    if cache is None:
        assert max_length is not None
        cache = model.init_cache(len(tokens), max_length)
    return in_chunks(read, tokens, lengths, (cache, state))


def unread_tokens(
    context: Context, num_read: Int[Array, " B"] | np.ndarray
) -> tuple[Tokens, Lengths] | None:
    """Returns the tokens of texts after the first `num_read`, without the last; None: none."""
    first = on_host(num_read).astype(np.int32)
    count = on_host(context.length) - 1 - first
    if not count.any():
        return None
    width = buffer_size(int(count.max()))
    first, count = placed_like(context.length, (jnp.asarray(first), jnp.asarray(count)))
    return placed_like(context.length, tokens_from(context.tokens, first, width)), count


@functools.partial(jax.jit, static_argnames="width")
def tokens_from(
    tokens: Int[Array, "B L"], first: Int[Array, " B"] | np.ndarray, width: int
) -> Int[Array, "B _"]:
    """`width` tokens of each row from position `first`; those past a row's buffer are any."""
    places = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(tokens, places, axis=1, mode="clip")


def in_chunks(
    read: Callable[[Array, Array, Any], Any], tokens: Array, lengths: Array, carry: Any
) -> Any:
    """Calls `read` with each chunk of the rows and its lengths; from one carry to the next."""
    if tokens.shape[1] <= PREFILL_CHUNK:
        return read(tokens, lengths, carry)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % PREFILL_CHUNK)))

    def one_chunk(index: Array, carry: Any) -> Any:
        start = index * PREFILL_CHUNK
        chunk = lax.dynamic_slice_in_dim(tokens, start, PREFILL_CHUNK, axis=1)
        return read(chunk, jnp.clip(lengths - start, 0, PREFILL_CHUNK), carry)

    num_chunks = (lengths.max() + PREFILL_CHUNK - 1) // PREFILL_CHUNK
    return lax.fori_loop(0, num_chunks, one_chunk, carry)
