"""Buffers with an axis of tree nodes, `[B, N, ...]`."""

from typing import Any

import jax
import numpy as np

from stree_jax.array_types import Array, Int


def put(buffer: Array, nodes: np.ndarray | Int[Array, " _"], values: Array) -> Array:
    """Writes the values of nodes, those that the tree does not have left out."""
    return buffer.at[:, nodes].set(values, mode="drop")


def take(buffers: Any, nodes: Any) -> Any:
    """The values `[B, Q, ...]` at nodes: `[Q]`, or `[B, Q]` where rows differ."""
    if nodes.ndim == 1:
        return jax.tree.map(lambda leaf: leaf[:, nodes], buffers)
    return jax.tree.map(lambda leaf: jax.vmap(lambda row, at: row[at])(leaf, nodes), buffers)
