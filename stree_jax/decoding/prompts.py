"""Prompts of rows, in buffers of few sizes, and their random keys."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Int
from stree_jax.checks import check_ids, check_int, require
from stree_jax.messages import shown

# Buffer sizes are rounded up to a few values, so that nearby requests share compiled programs.
_SMALLEST_BUFFER = 64
MAX_TOKENS = 2**24  # most tokens of a row, prompt and output: far beyond any model's context
MAX_ROWS = 2**16  # far beyond what a device decodes at once
_IMPL = "threefry2x32"  # of keys from seeds: "rbg" draws other numbers in another batch


class Context(NamedTuple):
    """The text of each row so far."""

    tokens: Int[Array, "B L"]  # prompt, new tokens, then unspecified values
    length: Int[Array, " B"]  # valid tokens; the last of them is the root of the next tree


def buffer_size(needed: int) -> int:
    """Rounds up a buffer size: 64, 96, 128, 192, 256, 384, 512, 768, ..."""
    size = _SMALLEST_BUFFER
    while size < needed:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def list_size(needed: int) -> int:
    """Rounds up the size of a list that costs little, as of end tokens: 8, 32, 128, 512, ...

    Coarser than `buffer_size`, since the numbers of sizes of all such lists multiply.
    """
    size = 8
    while size < needed:
        size *= 4
    return size


def check_num_rows(name: str, value: int) -> None:
    """Refuses a number that is none of rows: they are one axis of all arrays."""
    check_int(name, value, 1)
    require(value <= MAX_ROWS, f"{name} = {shown(value)}: a batch has at most {MAX_ROWS} rows")


def checked_prompts(
    prompts: Sequence[Sequence[int]] | Any,
    vocab_size: int,
    name: str = "prompts",
    *,
    may_be_empty: bool = False,
) -> list[np.ndarray]:
    """The token ids of each row; `name` is what messages call them."""
    is_array = isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim > 0
    if not (is_array or isinstance(prompts, Sequence)):
        raise ValueError(
            f"{name} must be a list with a list of token ids for each row, got"
            f" {shown(prompts)}{_way_out(prompts)}"
        )
    if len(prompts) == 0:
        raise ValueError(f"{name} is empty; pass a list with at least one list of token ids")
    rows = []
    for i, prompt in enumerate(prompts):
        try:
            row = np.asarray(prompt)
        except ValueError:  # lists of different lengths inside
            row = np.empty((0, 0))
        if isinstance(prompt, str) or row.ndim != 1:
            raise ValueError(
                f"{name}[{i}] is not a list of token ids: {name} is a list of lists, one a row,"
                f" such as [[1, 2, 3]]{_way_out(prompt)}"
            )
        if row.size == 0 and may_be_empty:
            row = row.astype(np.int32)
        elif row.size == 0:
            raise ValueError(f"{name}[{i}] is empty; it needs at least one token")
        check_ids(f"{name}[{i}]", row, vocab_size)
        rows.append(row)
    return rows


def checked_places(keep: Sequence[int] | Any, least: int, most: int) -> list[int]:
    """The numbers of first tokens of a text after which a state is kept, ascending."""
    require(isinstance(keep, Sequence), f"keep must be a list of positions, got {shown(keep)}")
    return sorted({check_int("keep", place, least, most) for place in keep})


def in_buffers(rows: Sequence[Sequence[int] | np.ndarray], width: int | None = None) -> Context:
    """Right-padded texts in buffers of `width`; None: of the next size of the longest."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), width or buffer_size(int(lengths.max()))), np.int32)
    for buffer, row in zip(tokens, rows, strict=True):
        buffer[: len(row)] = row
    return Context(*jax.device_put((tokens, lengths)))


def _way_out(prompt: Any) -> str:
    """How to make token ids of a text, or of what a tokenizer made of it."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:  # of transformers
        return "; it has them as ['input_ids']"
    if isinstance(prompt, str | Mapping):  # or a message
        return "; st.complete takes texts and messages, tokenizer.encode(text).ids makes ids"
    return "; an encoding has them as .ids" if hasattr(prompt, "ids") else ""


def check_length(
    context: Context, max_new_tokens: Sequence[int], max_length: int | None, made_for: int | None
) -> None:
    """Refuses texts longer than the user's limit, or the context that a model is made for."""
    limit = made_for if max_length is None else max_length
    lengths = np.asarray(context.length).tolist()
    totals = [length + most for length, most in zip(lengths, max_new_tokens, strict=True)]
    row = max(range(len(totals)), key=totals.__getitem__)
    total = totals[row]
    way_out = "" if max_length is not None else "; max_length = ... goes beyond it"
    if limit is None or limit > MAX_TOKENS:
        limit, way_out = MAX_TOKENS, ""
    if total > limit:
        raise ValueError(
            f"prompts[{row}] has {lengths[row]} tokens and max_new_tokens ="
            f" {shown(max_new_tokens[row])}: in all {shown(total)}, and the limit is"
            f" {limit}{way_out}"
        )


def typed_key(key: Any) -> Array:
    """A typed key or array of keys, from keys, raw key data, a seed, or a list of keys or seeds."""
    if _is_typed(key):
        return key
    if isinstance(key, list | tuple) and key and all(map(_is_typed, key)):
        return jnp.stack(key)
    try:
        is_data = isinstance(key, np.ndarray | jax.Array) and key.dtype == np.uint32
        values = [] if is_data or np.ndim(key) > 1 else np.asarray(key, object).ravel().tolist()
        seeds = [check_int("seed", value, 0, 2**32 - 1) for value in values]
        if not seeds:
            data = jax.device_put(np.asarray(key))
            impl = _IMPL if data.shape[-1:] == (2,) else None
            return jax.random.wrap_key_data(data, impl=impl)
        return _from_seeds(jax.device_put(np.array(seeds, np.uint32))).reshape(np.shape(key))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            "key must be a random key such as jax.random.key(0), or a seed from 0 to 2**32 - 1, got"
            f" {shown(key)}"
        ) from None


@jax.jit
def _from_seeds(seeds: Array) -> Array:
    return jax.vmap(functools.partial(jax.random.key, impl=_IMPL))(seeds)


def _is_typed(key: Any) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def row_keys(key: Any, batch: int) -> Array:
    """A key per row: `key` with the row's index folded in, or the keys that were given."""
    key = typed_key(key)
    if key.shape == (batch,):
        return key
    if key.ndim:
        raise ValueError(
            f"key must be a single random key or one for each of {batch} rows, got an array of"
            f" shape {key.shape}"
        )
    return _folded(key, batch)


@functools.partial(jax.jit, static_argnums=1)
def _folded(key: Array, batch: int) -> Array:
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch, dtype=jnp.int32))
