"""Growing a tree level by level: unrolled if it has few levels, and in one loop otherwise.

Unrolled levels take long to compile: 40 levels of a small model took minutes. So below the root's
level deep trees are grown by `lax.scan`, whose levels are padded to the widest.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array
from stree_jax.decoding.nodes import unrolls
from stree_jax.tree import TreeTopology


class Level(NamedTuple):
    """A level, and how the next one follows from it: lists, or arrays while it grows.

    The last three are those of a static tree; a search finds out.
    """

    depth: Any
    nodes: Any  # nodes of the level with children
    read: Any  # their indices among all nodes with children, which the model runs
    children: Any  # the nodes of the next level
    parents: Any = ()  # their parents, as nodes of the tree ...
    source: Any = ()  # ... and as positions in `nodes`
    rank: Any = ()  # rank of each node of the next level among its siblings


def levels_of(topology: TreeTopology) -> list[Level]:
    """The levels with children, top down, of a topology in level order."""
    levels, first = [], 0
    inner = [node for node, children in enumerate(topology.children) if children]
    for depth, group in itertools.groupby(inner, key=topology.depths.__getitem__):
        nodes = list(group)
        families = [topology.children[node] for node in nodes]
        below = [child for family in families for child in family]
        levels.append(
            Level(
                depth,
                nodes,
                read=list(range(first, first + len(nodes))),
                children=below,
                parents=[topology.parents[child] for child in below],
                source=[at for at, family in enumerate(families) for _ in family],
                rank=[rank for family in families for rank in range(len(family))],
            )
        )
        first += len(nodes)
    return levels


def grow_levels(
    grow: Callable[[Any, Level, int], tuple[Any, Any]],
    start: Any,
    levels: Sequence[Level],
    widths: Sequence[int],
) -> tuple[Any, list[Any]]:
    """Calls `grow` for each level, top down, in Python or in a loop."""
    num_unrolled = len(levels) if unrolls(len(levels)) else 1
    grown, results = start, []
    for level, width in zip(levels[:num_unrolled], widths, strict=False):
        grown, result = grow(
            grown, Level(level.depth, *(np.array(part, np.int32) for part in level[1:])), width
        )
        results.append(jax.tree.map(lambda leaf: leaf[None], result))
    if num_unrolled == len(levels):
        return grown, results

    # The draft model's cache does not change below the root's level, so the loop does not carry it.
    reader = grown.reader
    width, num_read = max(widths[num_unrolled:]), sum(len(level.nodes) for level in levels)

    def body(carry: Any, level: Level) -> tuple[Any, Any]:
        grown, result = grow(
            carry._replace(reader=reader._replace(pending=carry.reader)), level, width
        )
        return grown._replace(reader=grown.reader.pending), result

    def room(leaf: Array) -> Array:
        """With room for the nodes below the root, the only one that was run."""
        return jnp.pad(leaf, [(0, num_read - 1 if i == 1 else 0) for i in range(leaf.ndim)])

    outside = {"read": num_read, "children": start.tokens.shape[1]}
    below = Level(
        *(
            jnp.asarray(_padded(part, outside.get(name)))
            for name, part in zip(
                Level._fields, zip(*levels[num_unrolled:], strict=True), strict=True
            )
        )
    )
    start_below = grown._replace(reader=jax.tree.map(room, reader.pending))
    grown, result = lax.scan(body, start_below, below)
    return grown._replace(reader=reader._replace(pending=grown.reader)), [*results, result]


def _padded(rows: Sequence[Any], fill: int | None) -> np.ndarray:
    """Numbers, or lists of different lengths, as an array; None repeats each list's last entry."""
    if not isinstance(rows[0], list):
        return np.array(rows, np.int32)
    width = max(map(len, rows))
    return np.array(
        [row + [row[-1] if fill is None else fill] * (width - len(row)) for row in rows], np.int32
    )
