"""Growing a tree level by level: the root's, then all others, many of them in one loop.

In the loop, `lax.scan`, levels are padded to the widest, and each is written into the record of
all: on a GPU that is four launches a Mamba-2 layer, beside its five. So there the few levels of a
whole model are one by one. They take longer to compile, 40 of a small model minutes, and on a CPU
as long to run.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import dispatch
from stree_jax.array_types import Array
from stree_jax.decoding.draft_model import WholeModelState
from stree_jax.tree import KnownNodes, LevelNodes, TreeTopology

MOST_ONE_BY_ONE = {"gpu": 5}  # levels, by platform


class Level(NamedTuple):
    """A level, and how the next one follows from it: lists, or arrays while it grows."""

    depth: Any
    nodes: Any  # nodes of the level with children
    # The same among all nodes with children, which the model runs: `KnownNodes` or `LevelNodes`
    # while it grows.
    read: Any
    children: Any  # the nodes of the next level
    source: Any = ()  # their parents, as positions in `nodes`; a search finds out
    rank: Any = ()  # their ranks among their siblings


def levels_of(topology: TreeTopology) -> list[Level]:
    """The levels with children, top down, of a topology in level order."""
    levels, first = [], 0
    inner = [node for node, children in enumerate(topology.children) if children]
    for depth, group in itertools.groupby(inner, key=topology.depths.__getitem__):
        nodes = list(group)
        families = [topology.children[node] for node in nodes]
        below = [child for family in families for child in family]
        read = list(range(first, first + len(nodes)))
        source = [at for at, family in enumerate(families) for _ in family]
        rank = [rank for family in families for rank in range(len(family))]
        levels.append(Level(depth, nodes, read, below, source, rank))
        first += len(nodes)
    return levels


def grow_levels(
    grow: Callable[[Any, Level, int], tuple[Any, Any]],
    start: Any,
    levels: Sequence[Level],
    widths: Sequence[int],
) -> tuple[Any, list[Any]]:
    """Calls `grow` for each level, top down, and stacks the results of the loop."""
    most = MOST_ONE_BY_ONE.get(dispatch.default_device().platform, 1)
    is_whole = isinstance(start.model_state, WholeModelState)  # heads may know the root alone
    num_alone = len(levels) if is_whole and len(levels) <= most else 1
    tree, results = start, []
    for level, width in zip(levels[:num_alone], widths, strict=False):
        arrays = Level(level.depth, *(np.array(part, np.int32) for part in level[1:]))
        nodes = KnownNodes(level.read[0], len(level.read))
        tree, result = grow(tree, arrays._replace(read=nodes), width)
        results.append(jax.tree.map(lambda leaf: leaf[None], result))
    below = levels[num_alone:]
    if not below:
        return tree, results

    # The draft model's cache does not change below the root's level, so the loop does not carry it.
    model_state = tree.model_state
    width, num_read = max(widths[1:]), sum(len(level.nodes) for level in levels)

    def body(carry: Any, level: Level) -> tuple[Any, Any]:
        carry = carry._replace(model_state=model_state._replace(pending=carry.model_state))
        tree, result = grow(carry, level, width)
        return tree._replace(model_state=tree.model_state.pending), result

    def room(leaf: Array) -> Array:
        """With room for the nodes below the root, the only one that was run."""
        return jnp.pad(leaf, [(0, num_read - 1 if i == 1 else 0) for i in range(leaf.ndim)])

    outside = {"read": num_read, "children": start.tokens.shape[1]}
    parts = zip(Level._fields, zip(*below, strict=True), strict=True)
    padded = Level(*(jnp.asarray(_padded(part, outside.get(name))) for name, part in parts))
    padded = padded._replace(read=LevelNodes(padded.read))
    start_below = tree._replace(model_state=jax.tree.map(room, model_state.pending))
    tree, result = lax.scan(body, start_below, padded)
    tree = tree._replace(model_state=model_state._replace(pending=tree.model_state))
    return tree, [*results, result]


def _padded(rows: Sequence[Any], fill: int | None) -> np.ndarray:
    """Numbers, or lists of different lengths, as an array; None repeats each list's last entry."""
    if not isinstance(rows[0], list):
        return np.array(rows, np.int32)
    width = max(map(len, rows))
    return np.array(
        [row + [row[-1] if fill is None else fill] * (width - len(row)) for row in rows], np.int32
    )
