"""Token trees: the static topology that a user chooses, and trees as arrays."""

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from stree_jax.array_types import Array, Bool, Int
from stree_jax.checks import check_int, require
from stree_jax.messages import shown

MAX_NODES = 4096  # masks and decays are N by N
MAX_DRAWN_DEPTH = 256  # each level is indented by three more characters


class Tree(NamedTuple):
    """A tree per batch row, as arrays: rows may differ, and may have fewer than N nodes.

    Node 0 is the root, the last emitted token. Parents come before children; siblings are in the
    order in which they were drawn. A node that is not `valid` is no node's ancestor.
    """

    parents: Int[Array, "B N"]  # -1 above a root
    depth: Int[Array, "B N"]  # edges to the root
    ancestor_mask: Bool[Array, "B N N"]  # [i, j]: j is an ancestor of i, or i itself
    valid: Bool[Array, "B N"]

    def on_path(self, last: Int[Array, " B"]) -> Bool[Array, "B N"]:
        """The nodes from the root to `last`."""
        return jnp.take_along_axis(self.ancestor_mask, last[:, None, None], axis=1)[:, 0]

    def at_depth(
        self, on_path: Bool[Array, "B N"], depth: Int[Array, "*#B D"]
    ) -> Int[Array, "B D"]:
        """The node of a path at each depth; 0 where the path has none."""
        is_there = on_path[:, None] & (self.depth[:, None] == depth[..., None])
        return lax.argmax(is_there, 2, jnp.int32)


@dataclasses.dataclass(frozen=True)
class TreeTopology:
    """The shape of a draft tree. Static and hashable: part of a program's compilation key.

    Attributes:
        parents: `parents[0] == -1` and `0 <= parents[i] < i`. Siblings are ranked by index: the
            drafter gives the first child its best (or first drawn) token.
        is_budget: made by `budget`: a size, whose shape a drafter chooses.

    Raises:
        ValueError: no nodes, two roots, a cycle, a child before its parent, or more than
            `MAX_NODES` nodes. The constructors below raise it for numbers out of range, too.
    """

    parents: tuple[int, ...]
    is_budget: bool = dataclasses.field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        listed = _items("parents", "[-1, 0, 0]", self.parents)
        parents = tuple(check_int("a parent", parent) for parent in listed)
        object.__setattr__(self, "parents", parents)
        _check_size(len(parents))
        require(bool(parents), "a tree needs at least its root: parents is empty, use [-1]")
        for node, parent in enumerate(parents):
            if not -1 <= parent < len(parents):
                raise ValueError(
                    f"node {node} has parent {shown(parent)}; nodes are 0 to {len(parents) - 1}"
                )
            if parent >= node:  # so is one of each cycle
                raise ValueError(
                    f"parents come before children, but node {node} has parent {parent};"
                    " renumber them"
                )
        roots = [node for node, parent in enumerate(parents) if parent == -1]
        if len(roots) > 1:
            raise ValueError(
                f"a tree has one root, parents {shown(parents)} have {len(roots)}: nodes"
                f" {shown(roots)}"
            )

    @classmethod
    def default(cls) -> "TreeTopology":
        """A chain of 3 drafts with a second choice for the first: what drafters take if told none.

        Of the trees that were timed none pays more at temperatures 0 and 1 together.
        """
        return cls((-1, 0, 0, 1, 3))

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> "TreeTopology":
        """The tree with these parents; the root's is -1."""
        return cls(_items("parents", "[-1, 0, 0]", parents))

    @classmethod
    def chain(cls, num_drafts: int) -> "TreeTopology":
        """One path of `num_drafts` tokens below the root: vanilla speculative decoding."""
        check_int("num_drafts", num_drafts, 0)
        _check_size(num_drafts + 1)
        return cls(tuple(range(-1, num_drafts)))

    @classmethod
    def complete(cls, branching: int, depth: int) -> "TreeTopology":
        """Every node above the last level has `branching` children."""
        check_int("depth", depth, 0)
        _check_size(depth + 1)
        return cls.from_branching((branching,) * depth)

    @classmethod
    def beam(cls, num_beams: int, num_steps: int) -> "TreeTopology":
        """`num_beams` chains of `num_steps` tokens: `1 + num_beams * num_steps` nodes.

        For `BeamDrafter` these are the level sizes only; the search decides how nodes connect.
        """
        check_int("num_beams", num_beams, 1)
        check_int("num_steps", num_steps, 0)
        _check_size(num_steps + 1)
        return cls.from_branching((num_beams, *(1,) * (num_steps - 1)) if num_steps else ())

    @classmethod
    def budget(cls, num_nodes: int, depth: int) -> "TreeTopology":
        """A size for `DynamicDrafter`: `num_nodes` nodes, the root included, and `depth`.

        As a static tree it is a chain of `depth` tokens, with the other nodes below the root.
        """
        check_int("num_nodes (the root counts)", num_nodes, 1)
        _check_size(num_nodes)
        check_int(f"the depth of {num_nodes} nodes", depth, 0, num_nodes - 1)
        if depth == 0 and num_nodes > 1:
            raise ValueError(f"a tree of depth 0 is its root; num_nodes must be 1, got {num_nodes}")
        if depth == 0:
            return cls((-1,), is_budget=True)
        width = num_nodes - depth  # children of the root, the first of which the chain goes through
        below = [1, *range(width + 1, num_nodes - 1)][: depth - 1]
        return cls((-1, *[0] * width, *below), is_budget=True)

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> "TreeTopology":
        """Every node of level i has `branching[i]` children."""
        branching = _items("branching", "(3, 2, 1)", branching)
        parents, level = [-1], [0]
        for level_index, children in enumerate(branching):
            check_int(f"branching[{level_index}]", children, 1)
            _check_size(len(parents) + len(level) * children)
            parents += [node for node in level for _ in range(children)]
            level = list(range(len(parents) - len(level) * children, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def paper(cls, name: str) -> "TreeTopology":
        """One of STree's static trees, "A" to "E" (table 3; Wu et al., 2025, arXiv:2505.14969).

        The table gives width, depth and size: A 3/4/13, B 16/3/29, C 6/3/16, D 4/4/13, E
        3/5/16. How nodes connect is only in a figure; here better-ranked nodes get more children,
        within those numbers.
        """
        if not isinstance(name, str) or name not in _PAPER_TREES:
            raise ValueError(f"the paper's trees are {sorted(_PAPER_TREES)}, got {shown(name)}")
        return cls(_PAPER_TREES[name])

    @property
    def num_nodes(self) -> int:
        """Nodes `N`, the root included."""
        return len(self.parents)

    @property
    def name(self) -> str:
        """What a table calls it: "no drafts", "chain of 4" or "tree of 5"."""
        if self.depth == self.num_nodes - 1:
            return f"chain of {self.depth}" if self.depth else "no drafts"
        return f"tree of {self.num_nodes}"

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges from each node to the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Depth `D`, the most drafts that a step can accept."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """Nodes of the largest level."""
        return max(collections.Counter(self.depths).values())

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, best ranked first."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @functools.cached_property
    def ancestor_mask(self) -> np.ndarray:
        """`[N, N]` bool, whether j is an ancestor of i, or i itself."""
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def level_order(self) -> "TreeTopology":
        """The same tree numbered breadth-first; siblings keep their order."""
        order = [0]
        for node in order:
            order += self.children[node]
        position = {node: index for index, node in enumerate(order)}
        parents = (-1, *(position[self.parents[node]] for node in order[1:]))
        return TreeTopology(parents, self.is_budget)

    def tree(self, valid: Bool[Array, "B N"]) -> Tree:
        """This topology as arrays, restricted to the `valid` nodes.

        A node below an invalid one must not be valid.
        """

        def rows(values: object, dtype: DTypeLike) -> Array:
            array = jnp.asarray(np.asarray(values), dtype)
            return jnp.broadcast_to(array, (valid.shape[0], *array.shape))

        mask = rows(self.ancestor_mask, jnp.bool_) & valid[:, None, :]
        return Tree(rows(self.parents, jnp.int32), rows(self.depths, jnp.int32), mask, valid)

    def draw(self, labels: Sequence[str] | None = None, path: Sequence[int] = ()) -> str:
        """A drawing of the tree in lines of text: a label per node, and `*` at the nodes of a path.

        Raises:
            ValueError: labels or path are not sequences, the number of labels is not the number of
                nodes, or the tree is deeper than `MAX_DRAWN_DEPTH`.
        """
        if not isinstance(labels, Iterable | None) or not isinstance(path, Iterable):
            raise ValueError(
                "labels are a text per node and path is a sequence of nodes, got"
                f" {shown(labels)} and {shown(path)}"
            )
        if self.depth > MAX_DRAWN_DEPTH:
            raise ValueError(
                f"a tree of {self.num_nodes} nodes and depth {self.depth} is too deep to draw; at"
                f" most {MAX_DRAWN_DEPTH} levels are drawn"
            )
        nodes = range(self.num_nodes)
        names = [str(name) for name in (nodes if labels is None else labels)]
        if len(names) != self.num_nodes:
            raise ValueError(f"{len(names)} labels for a tree of {self.num_nodes} nodes")
        marked = set(path)

        def lines(node: int, lead: str, below: str) -> Iterator[str]:
            yield lead + names[node] + (" *" if node in marked else "")
            for child in self.children[node]:
                here = ("└─ ", "   ") if child == self.children[node][-1] else ("├─ ", "│  ")
                yield from lines(child, below + here[0], below + here[1])

        return "\n".join(lines(0, "", ""))


def parsed(spec: str) -> Any:
    """The tree of words such as "chain:4"; several, to choose from, are "auto" or a list.

    Raises:
        ValueError: other words, or a file that `stree-jax tune-tree` did not write.
    """
    if spec == "auto":
        return spec
    kind, is_file, path = spec.partition("@")
    if is_file and kind in ("", "auto"):
        return _read(Path(path), "trees" if kind else "parents")
    kind, _, values = spec.partition(":")
    if kind == "paper":
        return TreeTopology.paper(values)
    try:
        numbers = [int(number) for number in values.split(",")]
    except ValueError:
        numbers = []
    match kind, numbers:
        case "chain", [num_drafts]:
            return TreeTopology.chain(num_drafts)
        case "complete", [branching, depth]:
            return TreeTopology.complete(branching, depth)
        case "beam", [num_beams, num_steps]:
            return TreeTopology.beam(num_beams, num_steps)
        case "budget", [num_nodes, depth]:
            return TreeTopology.budget(num_nodes, depth)
        case "branching", [_, *_]:
            return TreeTopology.from_branching(numbers)
        case "parents", [_, *_]:
            return TreeTopology.from_parents(numbers)
    raise ValueError(
        f"{shown(spec)} is not a tree:"
        " use auto, chain:4, complete:2,3, branching:3,2,1, beam:3,4, budget:32,6, paper:A,"
        " parents:-1,0,0, or @FILE or auto@FILE that tune-tree wrote"
    )


def _read(path: Path, field: str) -> Any:
    """The tree or the trees in a file of `stree-jax tune-tree`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))[field]
        if field == "trees":
            return [TreeTopology.from_parents(parents) for parents in content]
        return TreeTopology.from_parents([-1] if content is None else content)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not a tree of tune-tree: {str(error)[:120]}") from None


def first_nodes(tree: Tree, count: int) -> Tree:
    """The tree of the first `count` nodes."""
    parents, depth, mask, valid = tree
    return Tree(parents[:, :count], depth[:, :count], mask[:, :count, :count], valid[:, :count])


@dataclasses.dataclass(frozen=True)
class KnownNodes:
    """Consecutive nodes whose numbers are known while a program is traced, such as the root.

    Attributes:
        first: the first of them.
        count: how many there are.
    """

    first: int
    count: int

    @property
    def nodes(self) -> np.ndarray:
        """The nodes, `[Q]`."""
        return np.arange(self.first, self.first + self.count, dtype=np.int32)

    def shifted(self, number: int) -> "KnownNodes":
        """The same nodes where a tree has `number` more nodes in front."""
        return KnownNodes(self.first + number, self.count)

    def with_ancestors(self, tree: Tree) -> Tree:
        """The tree whose last nodes these are."""
        return first_nodes(tree, self.first + self.count)

    def recorded(self, pending: Any, record: Any) -> Any:
        """The records of all nodes so far; `record` is that of `with_ancestors`."""
        return record


class LevelNodes(NamedTuple):
    """Consecutive nodes of one level, in a loop over levels; those past the tree are padding.

    Attributes:
        nodes: the nodes, `[Q]`.
    """

    nodes: Int[Array, " Q"]

    def shifted(self, number: int) -> "LevelNodes":
        """See `KnownNodes`."""
        return LevelNodes(self.nodes + number)

    def with_ancestors(self, tree: Tree) -> Tree:
        """All nodes of a tree, of which only ancestors are valid, and then these nodes."""
        num_nodes = tree.parents.shape[1]
        above = (jnp.arange(num_nodes, dtype=jnp.int32) < self.nodes[0])[None]
        at = jnp.minimum(self.nodes, num_nodes - 1)
        valid: Bool[Array, "B Q"] = tree.valid[:, at] & (self.nodes < num_nodes)[None]
        mask = jnp.concatenate([tree.ancestor_mask, tree.ancestor_mask[:, at]], axis=1)
        itself = jnp.eye(len(self.nodes), dtype=bool)[None] & valid[:, None, :]
        itself = jnp.pad(itself, ((0, 0), (num_nodes, 0), (0, 0)))
        return Tree(
            parents=jnp.concatenate([tree.parents, tree.parents[:, at]], axis=1),
            depth=jnp.concatenate([tree.depth, tree.depth[:, at]], axis=1),
            ancestor_mask=jnp.concatenate([mask & above[None], itself], axis=2),
            valid=jnp.concatenate([tree.valid & above, valid], axis=1),
        )

    def recorded(self, pending: Any, record: Any) -> Any:
        """The records of all nodes so far: those of these nodes are written into `pending`."""
        return jax.tree.map(
            lambda old, new: put(old, self.nodes, new[:, old.shape[1] :]), pending, record
        )


def append_subtree(tree: Tree, node: Int[Array, " B"], lower: Tree) -> Tree:
    """Appends `lower` as a subtree of `node`, or beside the tree in rows where that is -1."""
    at, is_below = jnp.maximum(node, 0)[:, None], (node >= 0)[:, None]
    depth = jnp.take_along_axis(tree.depth, at, axis=1) + 1
    above = tree.on_path(at[:, 0]) & is_below
    (batch, num_nodes), num_lower = tree.parents.shape, lower.parents.shape[1]
    none = jnp.zeros((batch, num_nodes, num_lower), bool)
    above = jnp.broadcast_to(above[:, None], (batch, num_lower, num_nodes))
    old = jnp.concatenate([tree.ancestor_mask, none], axis=2)
    new = jnp.concatenate([above, lower.ancestor_mask], axis=2)
    parents = jnp.where(lower.parents < 0, node[:, None], num_nodes + lower.parents)
    return Tree(
        parents=jnp.concatenate([tree.parents, parents], axis=1),
        depth=jnp.concatenate([tree.depth, jnp.where(is_below, depth, 0) + lower.depth], axis=1),
        ancestor_mask=jnp.concatenate([old, new], axis=1),
        valid=jnp.concatenate([tree.valid, lower.valid], axis=1),
    )


def below_chain(present: Bool[Array, "B C"], tree: Tree) -> Tree:
    """The tree below a chain of nodes, from whose start nodes may be missing.

    Args:
        present: which nodes of the chain exist; a tree whose chain is missing has its own root.
        tree: what hangs below the last node of the chain.
    """
    slots = np.arange(present.shape[1], dtype=np.int32)[None]
    before = jnp.pad(present[:, :-1], ((0, 0), (1, 0)))
    chain = Tree(
        parents=jnp.where(before, slots - 1, -1),
        depth=jnp.maximum(jnp.cumsum(present, axis=1, dtype=jnp.int32) - 1, 0),
        ancestor_mask=jnp.asarray(slots <= slots.T)[None] & present[:, None, :],
        valid=present,
    )
    return append_subtree(chain, jnp.where(present[:, -1], slots.size - 1, -1), tree)


def put(buffer: Array, nodes: np.ndarray | Int[Array, " _"], values: Array) -> Array:
    """Writes the values of nodes into a buffer `[B, N, ...]`; nodes past its end are left out."""
    return buffer.at[:, nodes].set(values, mode="drop")


def take(buffers: Any, nodes: Any) -> Any:
    """The values `[B, Q, ...]` at nodes: `[Q]`, or `[B, Q]` where rows differ."""
    if nodes.ndim == 1:
        return jax.tree.map(lambda leaf: leaf[:, nodes], buffers)
    return jax.tree.map(lambda leaf: jax.vmap(lambda row, at: row[at])(leaf, nodes), buffers)


def _items(name: str, example: str, values: object) -> tuple:
    is_array = isinstance(values, np.ndarray | Array) and values.ndim == 1
    if not (is_array or (isinstance(values, Sequence) and not isinstance(values, str | bytes))):
        raise ValueError(f"{name} is a sequence such as {example}, got {shown(values)}")
    return tuple(np.asarray(values).tolist() if is_array else values)  # type: ignore[arg-type]


def _check_size(num_nodes: int) -> None:
    if num_nodes > MAX_NODES:
        raise ValueError(
            f"a tree of {shown(num_nodes)} nodes or more; at most {MAX_NODES} are possible"
        )


_PAPER_TREES = {
    "A": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8),
    "B": (-1, 0, 0, 0, 0, *(parent for parent in range(1, 13) for _ in "12")),
    "C": (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9),
    "D": (-1, 0, 0, 0, 0, 1, 1, 2, 3, 5, 6, 9, 10),
    "E": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 10, 11),
}
