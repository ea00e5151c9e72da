"""Gathers the rows of several processes into one batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from stree_jax.array_types import Array
from stree_jax.decoding.keys import typed_key
from stree_jax.decoding.options import Options
from stree_jax.decoding.prompts import checked_prompts
from stree_jax.mesh.partition import ONE_DEVICE
from stree_jax.models.lm import HybridLM


def rows_of_all(
    model: HybridLM, prompts: Sequence[Sequence[int]], options: Options
) -> tuple[list[list[int]], Options, slice]:
    """All-gathers the rows of all processes, in their order, and says which are this one's.

    All processes call this.

    Args:
        model: a model on a mesh.
        prompts: this process's prompts. Other processes may have more, fewer or none.
        options: options without a list for rows, except the key: one key, the same in all
            processes, or one for each row of this process.

    Returns:
        The prompts of all rows, the options with one key or those of all rows, and this process's
        rows.

    Raises:
        ValueError: a model on one device, options for each row; or this process or another one has
            bad prompts or keys. Of those all raise, because a process that continued would wait for
            the others.
    """
    if model.partition == ONE_DEVICE:
        raise ValueError(
            "local_rows = True is for a model on a mesh: load it with from_pretrained(...,"
            " mesh=make_mesh(...)); on one device all rows are this process's"
        )
    if entries := options.entries():
        raise ValueError(
            f"{next(iter(entries))} has a value for each row; with local_rows = True only the key"
            " may"
        )
    everyone, key, own = _gathered(prompts, options.key, model.config.vocab_size)
    return everyone, dataclasses.replace(options, key=key), own


def _gathered(
    prompts: Sequence[Sequence[int]], key: Any, vocab_size: int
) -> tuple[list[list[int]], Array | None, slice]:
    """The prompts of all rows, one key or those of all rows, and this process's rows."""
    refused: ValueError | None = None
    own: list[list[int]] = []
    own_keys = np.zeros((0, 1), np.uint32)
    one_key = True
    try:
        if not isinstance(prompts, Sequence) or len(prompts):
            context = checked_prompts(prompts, vocab_size)
            rows = zip(np.asarray(context.tokens), np.asarray(context.length), strict=True)
            own = [row[:length].tolist() for row, length in rows]
        if key is not None:
            key = typed_key(key)
            one_key = key.ndim == 0
            if not one_key and key.shape != (len(own),):
                raise ValueError(
                    f"key has the shape {key.shape}; give one key, or one for each of {len(own)}"
                    " rows of this process"
                )
            own_keys = np.asarray(jax.random.key_data(key))
    except ValueError as error:
        refused = error

    width = max(map(len, own), default=0)
    here = np.array([refused is None, len(own), width, one_key], np.int32)
    good, counts, widths, one_keys = multihost_utils.process_allgather(here).reshape(-1, 4).T
    if refused is not None:
        raise refused
    if not good.all():
        raise ValueError(
            f"the prompts of process {int(good.argmin())} are refused; its error says why"
        )
    if one_keys.min() != one_keys.max():
        raise ValueError("some processes passed one key, and some a key for each row")
    if not counts.sum():
        raise ValueError("no process has prompts; one of them needs at least one")

    lines = np.zeros((counts.max(), 1 + widths.max()), np.int32)  # a row's length, then its tokens
    for line, row in zip(lines, own, strict=False):
        line[: 1 + len(row)] = [len(row), *row]
    gathered = multihost_utils.process_allgather(lines).reshape(-1, *lines.shape)
    everyone = [
        line[1 : 1 + line[0]].tolist()
        for process, count in zip(gathered, counts, strict=True)
        for line in process[:count]
    ]
    if key is not None and not one_key:
        padded = np.zeros((counts.max(), *own_keys.shape[1:]), np.uint32)
        padded[: len(own)] = own_keys
        data = multihost_utils.process_allgather(padded).reshape(-1, *padded.shape)
        rows_of_keys = [process[:count] for process, count in zip(data, counts, strict=True)]
        impl = jax.random.key_impl(key)
        key = jax.random.wrap_key_data(jnp.asarray(np.concatenate(rows_of_keys)), impl=impl)
    first = int(counts[: jax.process_index()].sum())
    return everyone, key, slice(first, first + len(own))
