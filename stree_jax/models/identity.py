"""Which weights: one identity, by the names, shapes, dtypes and bits of arrays.

Prefixes, heads and the prefix cache belong to weights, and know them by it. It is the same in
another process, and on other devices. An array has two sums over its numbers: each
is mixed with its place first, so that numbers that change places change the sums, and then the
order of the sums does not matter. So every shard of a mesh adds up what it has.
"""

import functools
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array
from stree_jax.mesh.hosts import total_of_processes
from stree_jax.names import dotted

# Numbers of an array that NumPy adds up sooner than XLA compiles a program for its shape.
_SMALL = 1 << 16
# Shape, dtype and sums of arrays that live, by their id.
_known: dict[int, tuple[Any, ...]] = {}


def identity(module: Any) -> str:
    """Returns 64 hexadecimal digits that tell the weights of a module, or of any tree of arrays.

    An array is read once while it lives: a second call reads no array. Where arrays lie on devices
    of several processes, all of them call this.
    """
    leaves, structure = jax.tree.flatten(module)
    return identity_of(zip(_names(structure), leaves, strict=True))


def identity_of(weights: Iterable[tuple[str, Any]]) -> str:
    """The identity of arrays by their names, of which one at a time is held."""
    parts = [(name, *_known_of(values)) for name, values in weights]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def _names(structure: Any) -> list[str]:
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [dotted(path) for path, _ in jax.tree.leaves_with_path(numbered)]


def _known_of(values: Any) -> tuple[Any, ...]:
    """An array's shape, dtype and sums; jax arrays never change, so theirs are kept."""
    array = values if isinstance(values, jax.Array) else jnp.asarray(values)
    if (known := _known.get(id(array))) is None:
        known = array.shape, str(array.dtype), *_sums(array).tolist()
        weakref.finalize(array, _known.pop, id(array), None).atexit = False
        _known[id(array)] = known
    return known


def _sums(array: jax.Array) -> np.ndarray:
    """Both sums, modulo 2^32."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = array if array.ndim else array[None]
    if array.dtype.itemsize == 8:
        array = array.view(jnp.uint32)
    strides = np.cumprod([1, *array.shape[:0:-1]], dtype=np.uint32)[::-1]
    axes = [stride * np.arange(size) for stride, size in zip(strides, array.shape, strict=True)]
    total = np.zeros(2, np.uint32)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            parts = (axis[part] for axis, part in zip(axes, shard.index, strict=True))
            total += _sums_of_shard(shard.data, [part.astype(np.uint32) for part in parts])
    return total if array.is_fully_addressable else total_of_processes(total)


def _sums_of_shard(numbers: jax.Array, places: list[np.ndarray]) -> np.ndarray:
    """Of numbers whose places in the whole array, in a row, are sums of `places` of their axes."""
    if numbers.size > _SMALL:
        return np.stack(_reduced(numbers, places))
    return np.stack(_mixed(np.asarray(numbers), places)).reshape(2, -1).sum(1, np.uint32)


@jax.jit
def _reduced(numbers: Array, places: list[Array]) -> Any:
    zeros, add = (np.uint32(0), np.uint32(0)), functools.partial(jax.tree.map, lax.add)
    return lax.reduce(_mixed(numbers, places), zeros, add, range(numbers.ndim))


def _mixed(numbers: Any, places: Sequence[Any]) -> tuple[Any, Any]:
    """Each number's bits, mixed with its place; and that times an odd number of the place."""
    place = functools.reduce(lambda outer, inner: outer[..., None] + inner, places)
    words = numbers.view(f"uint{8 * numbers.dtype.itemsize}").astype(np.uint32)
    words = words ^ (place * np.uint32(0x9E3779B1))
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)  # MurmurHash3's last steps
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    words = words ^ (words >> 16)
    return words, words * (2 * place + 1)
