import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stree_jax import TreeTopology
from stree_jax.tree import MAX_DRAWN_DEPTH, MAX_NODES
from tests.helpers import by_message, refusal


@st.composite
def parents_of_trees(draw):
    nodes = draw(st.integers(1, 12))
    return (-1, *(draw(st.integers(0, i - 1)) for i in range(1, nodes)))


@pytest.mark.parametrize(
    ("topology", "parents"),
    [
        (TreeTopology.chain(0), (-1,)),
        (TreeTopology.chain(3), (-1, 0, 1, 2)),
        (TreeTopology.complete(2, 2), (-1, 0, 0, 1, 1, 2, 2)),
        (TreeTopology.from_branching((2, 1)), (-1, 0, 0, 1, 2)),
        (TreeTopology.beam(2, 3), (-1, 0, 0, 1, 2, 3, 4)),
        (TreeTopology.beam(2, 0), (-1,)),
        (TreeTopology.budget(1, 0), (-1,)),
        (TreeTopology.budget(4, 3), (-1, 0, 1, 2)),
        (TreeTopology.budget(4, 1), (-1, 0, 0, 0)),
        (TreeTopology.budget(7, 3), (-1, 0, 0, 0, 0, 1, 5)),
        (TreeTopology.from_branching(()), (-1,)),
        (TreeTopology.from_parents([-1, 0, 0, 1]), (-1, 0, 0, 1)),
    ],
)
def test_constructors(topology, parents):
    assert topology.parents == parents
    assert topology == topology.level_order()


@pytest.mark.parametrize(
    ("name", "width", "depth", "nodes"),
    [("A", 3, 4, 13), ("B", 16, 3, 29), ("C", 6, 3, 16), ("D", 4, 4, 13), ("E", 3, 5, 16)],
)
def test_the_papers_trees_have_the_sizes_of_its_table(name, width, depth, nodes):
    tree = TreeTopology.paper(name)
    assert (tree.width, tree.depth, tree.num_nodes) == (width, depth, nodes)
    assert tree == tree.level_order()
    # The main tree drafts three tokens a level.
    assert name != "A" or [tree.depths.count(depth) for depth in range(5)] == [1, 3, 3, 3, 3]


MALFORMED = [
    ([], "needs at least its root"),
    ([-1, 0, -1], r"has one root.*2: nodes \[0, 2\]"),
    ([-1, 2, 0], "node 1 has parent 2; renumber"),
    ([1, -1], "node 0 has parent 1; renumber"),
    ([-1, 5], "node 1 has parent 5; nodes are 0 to 1"),
]
WRONG = [
    *((lambda p=parents: TreeTopology.from_parents(p), message) for parents, message in MALFORMED),
    (lambda: TreeTopology.chain(-1), "num_drafts must be an integer, at least 0; got -1"),
    (lambda: TreeTopology.complete(0, 2), r"branching\[0\] must be an integer, at least 1; got 0"),
    (lambda: TreeTopology.from_branching((2, 0)), r"branching\[1\] must be .*, at least 1; got 0"),
    (lambda: TreeTopology.paper("F"), "'A', .*'E'.*got 'F'"),
    (lambda: TreeTopology.complete(2, 40), "at most 4096 are possible"),
    (lambda: TreeTopology.budget(0, 0), r"num_nodes \(the root counts\) must be an integer, at"),
    (lambda: TreeTopology.budget(4, 4), "the depth of 4 nodes must be .*, from 0 to 3; got 4"),
    (lambda: TreeTopology.budget(4, 0), "a tree of depth 0 is its root; num_nodes must be 1"),
]


@by_message(("make", "message"), WRONG)
def test_what_is_refused(make, message):
    refusal(message, make)


@given(parents_of_trees())
def test_ancestors_depths_and_children_agree(parents):
    tree = TreeTopology(parents)
    for node in range(tree.num_nodes):
        path, above = [], node
        while above >= 0:
            path.append(above)
            above = tree.parents[above]
        assert tree.depths[node] == len(path) - 1
        assert set(np.flatnonzero(tree.ancestor_mask[node])) == set(path)
        assert all(tree.parents[child] == node for child in tree.children[node])
    assert sum(map(len, tree.children)) == tree.num_nodes - 1


@given(parents_of_trees())
def test_level_order_is_the_same_tree(parents):
    tree = TreeTopology(parents)
    ordered = tree.level_order()
    assert list(ordered.depths) == sorted(tree.depths)
    starts = [child for children in ordered.children for child in children]
    assert starts == sorted(starts)  # children of earlier nodes come first
    assert ordered.level_order() == ordered

    def shape(tree, node=0):
        return [shape(tree, child) for child in tree.children[node]]

    assert shape(tree) == shape(ordered)


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_budget_has_these_sizes(num_nodes, depth):
    depth = min(depth, num_nodes - 1)
    tree = TreeTopology.budget(num_nodes, depth)
    assert (tree.num_nodes, tree.depth) == (num_nodes, depth)
    assert tree == tree.level_order()


def test_missing_nodes_are_nobodys_ancestor():
    tree = TreeTopology.from_branching((2, 1)).tree(jnp.array([[1, 1, 0, 1, 0]], bool))
    assert tree.ancestor_mask[0, 4].tolist() == [True, False, False, False, False]
    assert tree.ancestor_mask[0, 3].tolist() == [True, True, False, True, False]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2]


def test_drawing():
    tree = TreeTopology.from_parents([-1, 0, 0, 1, 1])
    assert tree.draw() == "0\n├─ 1\n│  ├─ 3\n│  └─ 4\n└─ 2"
    assert tree.draw(list("abcde"), path=[0, 2]) == "a *\n├─ b\n│  ├─ d\n│  └─ e\n└─ c *"
    refusal("2 labels for a tree of 5 nodes", tree.draw, ["x", "y"])


def lines_run_by(function):
    """Its result, and the number of lines of the module of trees that ran."""
    lines, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_globals.get("__name__") != TreeTopology.__module__:
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        return function(), lines
    finally:
        sys.settrace(before)


def test_the_largest_trees_are_quick():
    """A chain of 4,000 took 110 s and 600 MB to print, and a second to make and to measure."""

    def measured():
        tree = TreeTopology.chain(MAX_NODES - 1)
        assert tree.level_order() == tree
        return tree, tree.width, tree.depth

    (tree, *sizes), lines = lines_run_by(measured)
    assert sizes == [1, MAX_NODES - 1]
    assert lines < 100 * MAX_NODES
    refusal("a tree of 4096 nodes and depth 4095 is too deep to draw", tree.draw)
    deepest = TreeTopology.chain(MAX_DRAWN_DEPTH)
    assert deepest.draw(path=deepest.parents[1:]).count("*") == MAX_DRAWN_DEPTH
    with pytest.raises(ValueError, match="node 1 has parent 2; renumber") as error:
        TreeTopology.from_parents([-1, *range(2, 4001), 4000])
    assert len(str(error.value)) < 300
