"""A radix tree: values by sequences of tokens, and which of them a text begins with."""

from collections.abc import Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class _Node(Generic[Value]):
    """A node; its path from the root spells the tokens of all edges on it."""

    __slots__ = ("children", "edge", "parent", "value")

    def __init__(self, parent: "_Node[Value] | None", edge: tuple[int, ...]):
        self.parent = parent
        self.edge = edge  # tokens since the parent
        self.children: dict[int, _Node[Value]] = {}  # by the first token of their edges
        self.value: Value | None = None


class RadixTree(Generic[Value]):
    """Values by sequences of tokens.

    A node has a value, or at least two children, but for the root. So there are at most twice as
    many nodes as values.
    """

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node(None, ())

    def __setitem__(self, tokens: Sequence[int], value: Value) -> None:
        """Sets the value of a sequence."""
        node, at, within = self._walk(tokens)
        if within:
            node = self._split(node, within)
        if at < len(tokens):
            below: _Node[Value] = _Node(node, tuple(tokens[at:]))
            node.children[tokens[at]] = below
            node = below
        node.value = value

    def __delitem__(self, tokens: Sequence[int]) -> None:
        """Removes a sequence.

        Raises:
            KeyError: it has no value.
        """
        node, at, within = self._walk(tokens)
        if at < len(tokens) or within or node.value is None:
            raise KeyError(tuple(tokens))
        node.value = None
        if not node.children and node.parent is not None:
            del node.parent.children[node.edge[0]]
            node = node.parent
        self._join(node)

    def longest(self, tokens: Sequence[int]) -> Value | None:
        """The value of the longest sequence that `tokens` begins with, or is."""
        node, _, within = self._walk(tokens)
        found: _Node[Value] | None = node.parent if within else node
        while found is not None and found.value is None:
            found = found.parent
        return None if found is None else found.value

    def shared(self, tokens: Sequence[int]) -> int:
        """Length of the longest common prefix with any sequence."""
        return self._walk(tokens)[1]

    def _walk(self, tokens: Sequence[int]) -> tuple[_Node[Value], int, int]:
        """Follows the tokens as far as there are edges.

        Returns:
            The last node, how many tokens were followed, and how many of them along the node's
            edge if its end was not reached; 0 if it was.
        """
        node, at = self._root, 0
        while at < len(tokens) and (below := node.children.get(tokens[at])) is not None:
            node = below
            rest = zip(node.edge, tokens[at : at + len(node.edge)], strict=False)
            same = next((i for i, (a, b) in enumerate(rest) if a != b), None)
            if same is None:
                same = min(len(node.edge), len(tokens) - at)
            at += same
            if same < len(node.edge):
                return node, at, same
        return node, at, 0

    def _split(self, node: _Node[Value], at: int) -> _Node[Value]:
        """A new node on the edge of a node, `at` tokens below its parent."""
        assert node.parent is not None
        middle: _Node[Value] = _Node(node.parent, node.edge[:at])
        node.parent.children[node.edge[0]] = middle
        node.parent, node.edge = middle, node.edge[at:]
        middle.children[node.edge[0]] = node
        return middle

    def _join(self, node: _Node[Value]) -> None:
        """Joins a node without value to its only child."""
        if node.value is None and node.parent is not None and len(node.children) == 1:
            (below,) = node.children.values()
            below.parent, below.edge = node.parent, node.edge + below.edge
            node.parent.children[node.edge[0]] = below
