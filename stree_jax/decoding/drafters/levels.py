"""The levels of a static tree, and running one of them inside a loop over levels.

Unrolled levels take long to compile: 40 levels of a small model took minutes. So deep trees are
grown by a loop, whose buffers have room for the whole tree and whose levels are padded to the
widest.
"""

import collections
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.array_types import Array, Bool, Int
from stree_jax.models.cache import Pending
from stree_jax.tree import Tree, TreeTopology

# Trees with more levels are grown by a loop. Unrolled levels need no padding.
MAX_UNROLLED = 8


class Level(NamedTuple):
    """A level, and how the next one follows from it."""

    inner: list[int]  # nodes of the level with children
    width: int  # most children of any node
    children: list[int]  # the nodes of the next level
    parents: list[int]  # their parents, as topology nodes ...
    source: list[int]  # ... and as positions in `inner`
    rank: list[int]  # rank of each node of the next level among its siblings
    next_inner: np.ndarray  # positions of the next level's nodes with children


def levels_of(topology: TreeTopology) -> list[Level]:
    """The levels with children, top down, of a topology in level order."""
    levels = []
    inner_nodes = [node for node, children in enumerate(topology.children) if children]
    for _, group in itertools.groupby(inner_nodes, key=topology.depths.__getitem__):
        inner = list(group)
        families = [topology.children[node] for node in inner]
        below = [child for family in families for child in family]
        levels.append(
            Level(
                inner=inner,
                width=max(map(len, families)),
                children=below,
                parents=[topology.parents[child] for child in below],
                source=[at for at, family in enumerate(families) for _ in family],
                rank=[rank for family in families for rank in range(len(family))],
                next_inner=np.flatnonzero([bool(topology.children[c]) for c in below]),
            )
        )
    return levels


def widths_of(topology: TreeTopology) -> list[int]:
    """Number of nodes of each level, the root's first."""
    counts = collections.Counter(topology.depths)
    return [counts[depth] for depth in range(topology.depth + 1)]


def padded(rows: list[list[int]], fill: int | None = None, width: int = 0) -> np.ndarray:
    """Lists of different lengths as an array; None repeats each list's last entry.

    Args:
        rows: the lists.
        fill: value that pads shorter lists.
        width: minimum number of columns.
    """
    width = max(width, *map(len, rows))
    return np.array(
        [row + [row[-1] if fill is None else fill] * (width - len(row)) for row in rows], np.int32
    )


def with_zeros(rows: Array, size: int, axis: int = 1) -> Array:
    """Pads an axis with zeros to `size`."""
    pads = [(0, size - rows.shape[i] if i == axis else 0) for i in range(rows.ndim)]
    return jnp.pad(rows, pads)


def level_behind(tree: Tree, queries: Int[Array, " Q"]) -> Tree:
    """The ancestors of `queries` in N fixed slots, then the query nodes.

    A model runs a level this way inside a loop: it gets the pending record of N slots, of which
    only those above the level are valid, and Q queries.

    Args:
        tree: the nodes that the model runs, level by level; nodes below `queries` are ignored.
        queries: consecutive nodes of one level; indices outside the tree are padding.
    """
    num_nodes = tree.parents.shape[1]
    above = jnp.arange(num_nodes) < queries[0]
    at = jnp.minimum(queries, num_nodes - 1)
    valid: Bool[Array, "B Q"] = tree.valid[:, at] & (queries < num_nodes)
    mask = jnp.concatenate([tree.ancestor_mask, tree.ancestor_mask[:, at]], axis=1) & above
    itself = jnp.eye(len(queries), dtype=bool) & valid[:, None, :]
    itself = jnp.pad(itself, ((0, 0), (num_nodes, 0), (0, 0)))
    return Tree(
        parents=jnp.concatenate([tree.parents, tree.parents[:, at]], axis=1),
        depth=jnp.concatenate([tree.depth, tree.depth[:, at]], axis=1),
        ancestor_mask=jnp.concatenate([mask, itself], axis=2),
        valid=jnp.concatenate([tree.valid & above, valid], axis=1),
    )


def with_level(pending: Pending, read: Pending, queries: Int[Array, " Q"]) -> Pending:
    """The record with the queries in their slots; `read` is the record of a `level_behind`."""

    def put(before: Array, after: Array) -> Array:
        return before.at[:, queries].set(after[:, before.shape[1] :], mode="drop")

    return jax.tree.map(put, pending, read)
