"""Continued texts: from the rows of a generation, or of a prefix, to those of the next one."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.decoding.capacity import cache_shapes, fits
from stree_jax.decoding.drafters import Drafter
from stree_jax.decoding.fingerprints import origin_of
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.plan import Plan
from stree_jax.decoding.prompts import MAX_TOKENS, buffer_size
from stree_jax.decoding.types import Context, DecodeState, Prefix
from stree_jax.models.lm import HybridLM


def prefix_of(decoder: SpeculativeDecoder, state: DecodeState) -> Prefix:
    """The prefix of all rows of a state that `run` returned; a failed row has length 0."""
    tokens, length = state.context
    context = Context(
        tokens[:, : decoder.max_length], jnp.where(state.failed > 0, 0, length).astype(jnp.int32)
    )
    return Prefix(context, state.cache, state.drafter)


def joined(prompts: Sequence[Sequence[int]], after: Prefix) -> list[list[int]]:
    """The texts of a prefix, each followed by its prompt.

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
        if fits(after.cache, cache_shapes(model, len(after.context.length), size)):
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
    every = len(request.context.length) // num_rows
    context = Context(*(values[::every] for values in request.context))
    before = after._replace(origin=None)  # static: programs serve prefixes of any
    if not is_own(after, model, request.drafter):
        before = before._replace(drafter=None)
    if len(after.context.length) < num_rows:
        before = repeated(before, num_rows)
    return request.decoder.read(model, request.drafter, context, before)


def is_own(after: Prefix, model: HybridLM, drafter: Drafter | None) -> bool:
    """Whether the drafter's state of a prefix is one of this drafter."""
    return after.origin is not None and after.origin == origin_of(model, drafter)


def compact(
    decoder: SpeculativeDecoder,
    model: HybridLM,
    drafter: Drafter | None,
    prefix: Prefix,
    size: int,
) -> Prefix:
    """A prefix of one row with buffers of `size` places, which `SpeculativeDecoder.read` takes.

    Args:
        decoder, model, drafter: the program.
        prefix: the prefix.
        size: at least the length of the text.
    """
    tokens, length = prefix.context
    context = Context(tokens[:, :size], length)
    return dataclasses.replace(decoder, max_length=size).read(model, drafter, context, prefix)


@jax.jit
def stacked(rows: Sequence[Any]) -> Any:
    """Concatenates the rows of several trees of arrays; one program for each number of trees."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)


@functools.partial(jax.jit, static_argnames="times")
def repeated(rows: Any, times: int) -> Any:
    """Repeats each row of all arrays in place, as one program."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), rows)
