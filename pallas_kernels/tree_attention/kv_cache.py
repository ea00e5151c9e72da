"""Keys and values of a cache and of tree nodes, and how an accepted path moves to the cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class KVCache(NamedTuple):
    """Keys and values of the tokens so far: `L` positions, filled from the front.

    Positions beyond the length are masked but must be finite: kernels multiply them by zero. They
    are initialised to zero. A *ring* keeps the last `L` tokens only: the token at position p is at
    index `p % L`.
    """

    keys: Float[Array, "B U L E"]
    values: Float[Array, "B U L E"]
    length: Int[Array, " B"]  # positions in use; of a ring, all tokens so far


class NodeKV(NamedTuple):
    """Keys and values of the nodes of a tree."""

    keys: Float[Array, "B N U E"]
    values: Float[Array, "B N U E"]


def write_kv(
    cache: KVCache,
    new: NodeKV,
    selected: Bool[Array, "B N"],
    place: Int[Array, "B N"],
    *,
    ring: bool = False,
) -> KVCache:
    """Appends the `selected` new keys and values to a cache.

    Args:
        cache: the tokens so far.
        new: the new keys and values.
        selected: which of them are written.
        place: position of each, relative to the cache's length; those selected are 0, 1, ...
            Writes beyond the capacity are dropped.
        ring: whether the cache is a ring; then the oldest tokens are overwritten.

    Returns:
        The cache. Its length grows by the number selected, so a length beyond the capacity means
        that some were dropped.
    """
    capacity = cache.keys.shape[2]
    position = cache.length[:, None] + place
    if ring and capacity:
        # Of tokens for one index only the last is written.
        selected_last = place >= selected.sum(axis=1, keepdims=True, dtype=jnp.int32) - capacity
        place = jnp.where(selected & selected_last, position % capacity, capacity)
    else:
        place = jnp.where(selected, position, capacity)
    row, head, _ = jnp.ogrid[: len(place), : cache.keys.shape[1], :1]

    def write(into: jax.Array, new: jax.Array) -> jax.Array:
        # Heads are indexed one by one: for a slice of all heads XLA transposes the cache on a GPU.
        new = new.swapaxes(1, 2).astype(into.dtype)
        return into.at[row, head, place[:, None]].set(new, mode="drop")

    length = cache.length + selected.sum(axis=1, dtype=jnp.int32)
    if not capacity:  # a whole sequence at once, such as in training
        return cache._replace(length=length)
    return KVCache(write(cache.keys, new.keys), write(cache.values, new.values), length)


def replay_kv(
    cache: KVCache, nodes: NodeKV, path: Bool[Array, "B N"], *, ring: bool = False
) -> KVCache:
    """Appends the nodes of a path to the cache, at consecutive positions.

    Args:
        cache: the cache before the root.
        nodes: keys and values of the whole tree.
        path: the accepted nodes, from the root down; all False changes nothing.
        ring: see `write_kv`.
    """
    # Path nodes are in order, parents first: a node's position is the number of nodes before it.
    return write_kv(cache, nodes, path, jnp.cumsum(path, axis=1, dtype=jnp.int32) - 1, ring=ring)
