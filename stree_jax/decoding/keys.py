"""Random keys of rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array
from stree_jax.checks import check_int
from stree_jax.messages import shown


def typed_key(key: Any) -> Array:
    """A typed key or array of keys, from keys, raw key data, a seed, or a list of keys or seeds.

    Raises:
        ValueError: not a key.
    """
    if _is_typed(key):
        return key
    if isinstance(key, list | tuple) and key and all(map(_is_typed, key)):
        return jnp.stack(key)
    try:
        seeds = _seeds(key)
        if seeds is None:
            return jax.random.wrap_key_data(jnp.asarray(key))
        keys = jax.vmap(jax.random.key)(jnp.asarray(np.array(seeds, np.uint32)))
        return keys if np.ndim(key) else keys[0]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            "key must be a random key such as jax.random.key(0), or a seed from 0 to 2**32 - 1, got"
            f" {shown(key)}"
        ) from None


def _is_typed(key: Any) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _seeds(key: Any) -> list[int] | None:
    """The seeds that were given, if it is not the data of keys."""
    if isinstance(key, np.ndarray | jax.Array) and key.dtype == np.uint32:
        return None
    values = np.asarray(key, object).ravel().tolist() if np.ndim(key) < 2 else []
    return [check_int("seed", value, 0, 2**32 - 1) for value in values] or None


def row_keys(key: Any, batch: int) -> Array:
    """A key per row: `key` with the row's index folded in, or the keys that were given.

    Raises:
        ValueError: not a key, or a wrong number of keys.
    """
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
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
