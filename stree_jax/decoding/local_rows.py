"""Gathers the rows of several processes into one batch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from stree_jax.array_types import Array
from stree_jax.decoding.keys import typed_key
from stree_jax.decoding.prompts import checked_prompts


def rows_of_all(
    prompts: Sequence[Sequence[int]], key: Array | None, vocab_size: int
) -> tuple[list[list[int]], Array | None, slice]:
    """All-gathers the rows of all processes, in their order, and says which are this one's.

    All processes call this.

    Args:
        prompts: this process's prompts. Other processes may have more, fewer or none.
        key: one key, the same in all processes, or one for each row of this process.
        vocab_size: vocabulary size of the model.

    Returns:
        The prompts of all rows, one key or those of all rows, and this process's rows.

    Raises:
        ValueError: this process or another one has bad prompts or keys. All raise, because a
            process that continued would wait for the others.
    """
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
