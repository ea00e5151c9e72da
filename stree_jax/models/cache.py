"""Caches, pending records and paths of whole models: an entry for each layer, see `layer.py`."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from stree_jax.array_types import Array, Int
from stree_jax.models.config import ModelConfig
from stree_jax.models.layer import Path as Path
from stree_jax.tree import Tree

Cache = tuple[Any, ...]
Pending = tuple[Any, ...]


def empty_path(batch: int, num_nodes: int) -> Path:
    """The path that replays nothing, of a tree of `num_nodes` nodes."""
    none = jnp.full(batch, -1, jnp.int32)
    return Path(jnp.zeros((batch, num_nodes), bool), jnp.tile(none[:, None], num_nodes), none)


def path_to(tree: Tree, last: Int[Array, " B"]) -> Path:
    """The path from the root to node `last`, -1 for the empty path."""
    on_path = tree.on_path(jnp.maximum(last, 0))
    return Path(on_path & (last >= 0)[:, None], tree.parents, last)


def replayed(path: Path) -> Path:
    """The path after its replay: the empty one, of the same tree."""
    return path._replace(mask=jnp.zeros_like(path.mask), last=jnp.full_like(path.last, -1))


def conv_widths(config: ModelConfig) -> tuple[int, ...]:
    """The conv widths that occur in a model."""
    return tuple(sorted({width for layer in config.distinct_layers for width in layer.conv_widths}))


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype: DTypeLike) -> Cache:
    """The cache before the first token: zeros."""
    return tuple(layer.init_cache(batch, max_length, dtype) for layer in config.layers)


def cache_specs(config: ModelConfig, axis: str | None) -> tuple[Any, ...]:
    """How the arrays of `init_cache` lie on a mesh; heads and channels along `axis`."""
    return tuple(layer.cache_specs(axis) for layer in config.layers)


def init_pending(config: ModelConfig, batch: int, num_nodes: int, dtype: DTypeLike) -> Pending:
    """The pending record of a tree that was never run, for replay along the empty path."""
    return tuple(layer.init_pending(batch, num_nodes, dtype) for layer in config.layers)


def pending_specs(config: ModelConfig, axis: str | None) -> tuple[Any, ...]:
    """How the arrays of `init_pending` lie on a mesh; heads and channels along `axis`."""
    return tuple(layer.pending_specs(axis) for layer in config.layers)
