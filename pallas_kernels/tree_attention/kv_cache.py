"""Keys and values of a cache and of tree nodes, and how an accepted path moves to the cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class KVCache(NamedTuple):
    """Keys and values of the tokens so far: a fixed number `L` of places, filled from the front.

    Places beyond the length are never seen, but must be finite: kernels multiply them by zero.
    They are zeros at first.
    """

    keys: Float[Array, "B U L E"]
    values: Float[Array, "B U L E"]
    length: Int[Array, " B"]  # places in use


class NodeKV(NamedTuple):
    """Keys and values of the nodes of a tree."""

    keys: Float[Array, "B N U E"]
    values: Float[Array, "B N U E"]


def write_kv(
    cache: KVCache, new: NodeKV, wanted: Bool[Array, "B N"], place: Int[Array, "B N"]
) -> KVCache:
    """Appends the `wanted` ones of some new keys and values to a cache.

    Args:
        cache: the tokens so far.
        new: keys and values.
        wanted: which of them are written.
        place: of each, counted from the cache's length; writes beyond the last place are dropped.

    Returns:
        The cache. Its length grows by all that were wanted, so a length beyond the capacity says
        that some were dropped.
    """
    capacity = cache.keys.shape[2]
    place = jnp.where(wanted, cache.length[:, None] + place, capacity)
    row, head, _ = jnp.ogrid[: len(place), : cache.keys.shape[1], :1]

    def write(into: jax.Array, new: jax.Array) -> jax.Array:
        # Heads are indexed one by one: for a slice of all heads XLA transposes the cache on a GPU.
        new = new.swapaxes(1, 2).astype(into.dtype)
        return into.at[row, head, place[:, None]].set(new, mode="drop")

    length = cache.length + wanted.sum(axis=1, dtype=jnp.int32)
    if not capacity:  # a whole sequence at once, such as in training
        return cache._replace(length=length)
    return KVCache(write(cache.keys, new.keys), write(cache.values, new.values), length)


def replay_kv(cache: KVCache, nodes: NodeKV, path: Bool[Array, "B N"]) -> KVCache:
    """The cache after a path of a tree, whose nodes fill consecutive places.

    Args:
        cache: before the root.
        nodes: of the whole tree.
        path: the accepted nodes, from the root down; all False changes nothing.
    """
    # Nodes of a path are in order, parents first: a node's place is the number of nodes before it.
    return write_kv(cache, nodes, path, jnp.cumsum(path, axis=1, dtype=jnp.int32) - 1)
