"""Texts that go on: from the rows of a generation, or of a prefix, to those of the next one."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Int
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.drafters.base import reads
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import Plan
from stree_jax.decoding.prefill import prefill, prefill_with_drafter
from stree_jax.decoding.prompts import MAX_TOKENS, buffer_size
from stree_jax.decoding.types import Context, DecodeState, Prefix
from stree_jax.models.cache import Cache
from stree_jax.models.lm import HybridLM


def prefix_of(decoder: SpeculativeDecoder, drafter: Drafter | None, state: DecodeState) -> Prefix:
    """The prefix of all rows of a state that `run` returned; a failed row has length 0."""
    tokens, length = state.context
    context = Context(
        tokens[:, : decoder.max_length], jnp.where(state.failed > 0, 0, length).astype(jnp.int32)
    )
    keeps = drafter is not None and reads(drafter)
    return Prefix(context, state.cache, state.drafter if keeps else None)


def joined(prompts: Sequence[Sequence[int]], after: Prefix) -> list[list[int]]:
    """The texts of a prefix, each with a prompt behind it.

    Raises:
        ValueError: another number of rows, or a row that failed.
    """
    lengths = np.asarray(after.context.length)
    if len(lengths) not in (1, len(prompts)):
        raise ValueError(
            f"after has {len(lengths)} rows, and prompts {len(prompts)}; give a prompt for each row"
            " (it may be empty), or a prefix of one row"
        )
    if not lengths.all():
        raise ValueError(
            f"row {int(lengths.argmin())} of after failed: its logits were not finite; take others,"
            " an array of rows, by jax.tree.map(lambda leaf: leaf[rows], prefix)"
        )
    tokens = np.asarray(after.context.tokens)
    read = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    if len(read) == 1:
        read *= len(prompts)
    return [[*text, *prompt] for text, prompt in zip(read, prompts, strict=True)]


def with_room(request: Plan, model: HybridLM, after: Prefix) -> Plan:
    """The plan of joined texts, with buffers at least as large as the prefix's.

    Raises:
        ValueError: the prefix is another model's.
    """
    size = request.decoder.max_length
    while size <= 2 * MAX_TOKENS:
        if _fits(after.cache, cache_shapes(model, len(after.context.length), size)):
            decoder = dataclasses.replace(request.decoder, max_length=size)
            return request._replace(decoder=decoder)
        size = buffer_size(size + 1)
    raise ValueError("after was read by another model: its caches have other shapes")


def continued(request: Plan, model: HybridLM, num_rows: int, after: Prefix) -> Prefix:
    """The prefix of joined texts: reads what follows `after` in each.

    Args:
        request: the plan of the joined texts, from `with_room`; rows may be repeated in place.
        model: the target.
        num_rows: number of different texts.
        after: the prefix of as many rows, or of one.
    """
    decoder, drafter, size = request.decoder, request.drafter, request.decoder.max_length
    every = len(request.context.length) // num_rows
    context = Context(*(values[::every] for values in request.context))
    wanted = cache_shapes(model, len(after.context.length), size)
    cache = jax.tree.map(_padded, after.cache, wanted)
    before = after._replace(cache=cache, origin=None)  # static: programs serve prefixes of any
    if len(after.context.length) < num_rows:
        before = repeated(before, num_rows)
    more = np.asarray(context.length - before.context.length)
    state = None
    if drafter is not None:
        state = drafter.prepare(context, decoder.topology, size)
        if reads(drafter) and same_rows(before.drafter, state):
            state = before.drafter
    if more.any():
        unread = _unread(context, before.context.length, buffer_size(int(more.max())))
        text = unread, jnp.asarray(more), size
        if drafter is not None and reads(drafter):
            cache, state = prefill_with_drafter(model, drafter, *text, state, before.cache)
        else:
            cache = prefill(model, *text, before.cache)
    else:
        cache = before.cache
    return Prefix(context, cache, state)


def repeated(rows: Any, times: int) -> Any:
    """Each row of all arrays as often, in place; one program."""
    return _repeated(rows, times)


@functools.partial(jax.jit, static_argnames="times")
def _repeated(rows: Any, times: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), rows)


def same_rows(one: Any, other: Any) -> bool:
    """Whether the arrays of two states differ in the number of rows only."""

    def shapes(arrays: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(arrays)
        return [(leaf.shape[1:], leaf.dtype) for leaf in leaves], structure

    return shapes(one) == shapes(other)


@functools.partial(jax.jit, static_argnames="width")
def _unread(context: Context, read: Int[Array, " B"], width: int) -> Int[Array, "B _"]:
    """The last token that was read of as a root, and those behind it, `width` of each row."""
    tokens = jnp.pad(context.tokens, ((0, 0), (0, width)))
    return jax.vmap(lambda row, at: lax.dynamic_slice(row, (at,), (width,)))(tokens, read - 1)


def cache_shapes(model: HybridLM, rows: int, size: int) -> Any:
    """Shapes and dtypes of the model's cache."""
    return jax.eval_shape(lambda: model.init_cache(rows, size))


def _fits(cache: Cache, wanted: Any) -> bool:
    """Whether a cache has the wanted arrays, of at most their sizes."""
    return len({*map(jax.tree.structure, (cache, wanted))}) == 1 and all(
        leaf.dtype == other.dtype
        and leaf.ndim == other.ndim
        and all(own <= most for own, most in zip(leaf.shape, other.shape, strict=True))
        for leaf, other in zip(jax.tree.leaves(cache), jax.tree.leaves(wanted), strict=True)
    )


def _padded(leaf: Array, wanted: Any) -> Array:
    """With zeros behind: places of attention caches, which nothing reads before it is written."""
    room = [(0, most - own) for own, most in zip(leaf.shape, wanted.shape, strict=True)]
    return jnp.pad(leaf, room) if any(after for _, after in room) else leaf
