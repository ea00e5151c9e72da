"""Buffers with an axis of tree nodes, `[B, N, ...]`."""

from typing import Any

import jax
import numpy as np
from jax import lax

from stree_jax.array_types import Array, Int

Nodes = np.ndarray | Int[Array, " _"]


def put(buffer: Array, nodes: Nodes, values: Array) -> Array:
    """Writes the values of consecutive nodes, those that the tree does not have left out."""
    if isinstance(nodes, np.ndarray):
        return lax.dynamic_update_slice_in_dim(buffer, values, int(nodes[0]), axis=1)
    return buffer.at[:, nodes].set(values, mode="drop")


def take(buffers: Any, nodes: Any) -> Any:
    """The values `[B, Q, ...]` at nodes: `[Q]`, or `[B, Q]` where rows differ."""
    if nodes.ndim == 1:
        return jax.tree.map(lambda leaf: leaf[:, nodes], buffers)
    return jax.tree.map(lambda leaf: jax.vmap(lambda row, at: row[at])(leaf, nodes), buffers)
