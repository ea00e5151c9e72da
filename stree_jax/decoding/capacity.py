"""Caches with more or fewer places: attention layers have one for each token of the longest text.

Places after a text are masked, and nothing reads them before they are written. So a cache may be
cut to any size that the text fits, or padded with zeros.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from stree_jax.array_types import Array
from stree_jax.mesh.partition import MODEL
from stree_jax.models.cache import cache_specs, init_cache
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM


def cache_shapes(model: HybridLM, rows: int, size: int) -> Any:
    """Shapes and dtypes of the model's cache of `size` places, on a mesh in all."""
    return _cache_shapes(model.config, model.activation_dtype, model.partition.shards, rows, size)


@functools.lru_cache(maxsize=256)  # asked for with each chunk of a text, and traced anew
def _cache_shapes(config: ModelConfig, dtype: Any, shards: int, rows: int, size: int) -> Any:
    local = config.local(shards)
    of_shard = jax.eval_shape(lambda: init_cache(local, rows, size, dtype))
    if shards == 1:
        return of_shard

    def of_all(spec: PartitionSpec, arrays: Any) -> Any:
        times = [shards if name == MODEL else 1 for name in spec]

        def whole(leaf: Any) -> Any:
            sizes = itertools.zip_longest(leaf.shape, times, fillvalue=1)
            return jax.ShapeDtypeStruct([size * n for size, n in sizes], leaf.dtype)

        return jax.tree.map(whole, arrays)

    return jax.tree.map(of_all, cache_specs(config, MODEL), of_shard)


def same_rows(one: Any, other: Any) -> bool:
    """True if the arrays of two states differ in the number of rows only."""

    def shapes(arrays: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(arrays)
        return [(leaf.shape[1:], leaf.dtype) for leaf in leaves], structure

    return shapes(one) == shapes(other)


def is_alike(arrays: Any, wanted: Any) -> bool:
    """True if arrays differ from the wanted ones in the sizes of axes only."""
    have: Any = jax.tree.structure(arrays)
    return have == jax.tree.structure(wanted) and all(
        leaf.dtype == other.dtype and leaf.ndim == other.ndim
        for leaf, other in zip(jax.tree.leaves(arrays), jax.tree.leaves(wanted), strict=True)
    )


def fits(arrays: Any, wanted: Any) -> bool:
    """True if arrays are like the wanted ones, and no axis is larger."""
    return is_alike(arrays, wanted) and all(
        own <= most
        for leaf, other in zip(jax.tree.leaves(arrays), jax.tree.leaves(wanted), strict=True)
        for own, most in zip(leaf.shape, other.shape, strict=True)
    )


def with_capacity(arrays: Any, wanted: Any) -> Any:
    """Arrays with the wanted sizes of all axes but the first: cut, or with zeros behind."""
    if same_rows(arrays, wanted):
        return arrays
    return _with_capacity(arrays, tuple(leaf.shape[1:] for leaf in jax.tree.leaves(wanted)))


@functools.partial(jax.jit, static_argnames="shapes")
def _with_capacity(arrays: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:
    def one(leaf: Array, shape: tuple[int, ...]) -> Array:
        leaf = leaf[(slice(None), *map(slice, shape))]
        room = [(0, most - own) for own, most in zip(leaf.shape[1:], shape, strict=True)]
        return jnp.pad(leaf, [(0, 0), *room])

    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, map(one, leaves, shapes))
