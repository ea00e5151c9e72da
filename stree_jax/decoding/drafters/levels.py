"""Growing a tree level by level: unrolled if it has few levels, and in one loop otherwise.

Unrolled levels take long to compile: 40 levels of a small model took minutes. So below the root's
level deep trees are grown by `lax.scan`, whose levels are padded to the widest.
"""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.array_types import Array
from stree_jax.decoding.nodes import unrolls
from stree_jax.tree import TreeTopology


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


def padded(rows: list[list[int]], fill: int | None = None) -> np.ndarray:
    """Lists of different lengths as an array; None repeats each list's last entry.

    Args:
        rows: the lists.
        fill: value that pads shorter lists.
    """
    width = max(map(len, rows))
    return np.array(
        [row + [row[-1] if fill is None else fill] * (width - len(row)) for row in rows], np.int32
    )


At = TypeVar("At")


def grow_levels(
    grow: Callable[[Any, At, int], tuple[Any, Any]],
    start: Any,
    levels: Sequence[At],
    fills: At,
    widths: Sequence[int],
    num_slots: int,
) -> tuple[Any, list[Any]]:
    """Calls `grow` for each level, top down, in Python or in a loop.

    Args:
        grow: from what has grown so far, a level and its width, what has grown then, and a result.
            Its levels are NumPy arrays where it is unrolled, and traced in the loop.
        start: a NamedTuple of buffers with room for the whole tree, and a field `reader`.
        levels: for each level a NamedTuple of lists of nodes, and of numbers.
        fills: the same of one value each, which pads lists in the loop to the longest; None repeats
            a list's last entry.
        widths: the width of each level; in the loop all have that of the widest.
        num_slots: nodes of the draft model's own tree.

    Returns:
        What has grown, and the results: groups of levels, each with an axis of levels first.
    """
    num_unrolled = len(levels) if unrolls(len(levels)) else 1
    grown, results = start, []
    for level, width in zip(levels[:num_unrolled], widths, strict=False):
        at = type(fills)(*(np.array(x) if isinstance(x, list) else x for x in level))  # type: ignore
        grown, result = grow(grown, at, width)
        results.append(jax.tree.map(lambda leaf: leaf[None], result))
    if num_unrolled == len(levels):
        return grown, results

    # The draft model's cache does not change below the root's level, so the loop does not carry it.
    reader = grown.reader
    width = max(widths[num_unrolled:])

    def body(carry: Any, at: At) -> tuple[Any, Any]:
        grown, result = grow(
            carry._replace(reader=reader._replace(pending=carry.reader)), at, width
        )
        return grown._replace(reader=grown.reader.pending), result

    def room(leaf: Array) -> Array:
        return jnp.pad(
            leaf, [(0, num_slots - n if i == 1 else 0) for i, n in enumerate(leaf.shape)]
        )

    below = [
        jnp.asarray(padded(list(part), fill) if isinstance(part[0], list) else np.array(part))
        for part, fill in zip(zip(*levels[num_unrolled:], strict=True), fills, strict=True)  # type: ignore[call-overload]
    ]
    start_below = grown._replace(reader=jax.tree.map(room, reader.pending))
    grown, result = lax.scan(body, start_below, type(fills)(*below))
    return grown._replace(reader=reader._replace(pending=grown.reader)), [*results, result]
