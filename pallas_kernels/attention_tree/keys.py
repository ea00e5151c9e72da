"""The keys and values of a cache, and of the nodes of a tree; how the ones get into the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class KeyCache(NamedTuple):
    """Keys and values of the tokens so far: a fixed number `L` of places, filled from the front.

    What is behind the length does not matter, but it must be finite; zeros at first.
    """

    keys: Float[Array, "B U L E"]
    values: Float[Array, "B U L E"]
    length: Int[Array, " B"]  # places that are filled


class NodeKeys(NamedTuple):
    """Keys and values of the nodes of a tree."""

    keys: Float[Array, "B N U E"]
    values: Float[Array, "B N U E"]


def write_keys(
    cache: KeyCache, new: NodeKeys, wanted: Bool[Array, "B N"], place: Int[Array, "B N"]
) -> KeyCache:
    """The cache with the `wanted` ones of the new keys and values, behind what it has.

    Args:
        cache: what came before.
        new: keys and values.
        wanted: which of them are written.
        place: of each, counted from the cache's length; what has no place is dropped.

    Returns:
        The cache. It is longer by all that were wanted: one longer than its places has lost some.
    """
    capacity = cache.keys.shape[2]
    place = jnp.where(wanted, cache.length[:, None] + place, capacity)
    row, head, _ = jnp.ogrid[: len(place), : cache.keys.shape[1], :1]

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        # Each head by its index: of a slice of all heads XLA transposes the cache on a GPU.
        new = new.swapaxes(1, 2).astype(into.dtype)
        return into.at[row, head, place[:, None]].set(new, mode="drop")

    length = cache.length + wanted.sum(axis=1, dtype=jnp.int32)
    if not capacity:  # of a whole sequence, such as in training
        return cache._replace(length=length)
    return KeyCache(put(cache.keys, new.keys), put(cache.values, new.values), length)


def replay_keys(cache: KeyCache, nodes: NodeKeys, path: Bool[Array, "B N"]) -> KeyCache:
    """The cache after a path of a tree, whose nodes fill consecutive places."""
    # Nodes of a path are in order, parents first: a node's place is how many are before it.
    return write_keys(cache, nodes, path, jnp.cumsum(path, axis=1, dtype=jnp.int32) - 1)
