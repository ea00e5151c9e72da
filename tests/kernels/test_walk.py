"""The order in which kernels visit trees and paths, by a walk through it with a stack of slots."""

import jax
import numpy as np
import pytest

from pallas_kernels import walk
from tests.cases.base import ancestor_mask

SHAPES = {
    "chain": lambda rng, node: node - 1,
    "binary": lambda rng, node: (node - 1) // 2,
    "star": lambda rng, node: 0,
    "random": lambda rng, node: rng.integers(0, node),
    "several roots": lambda rng, node: rng.integers(-1, node),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nodes", [1, 2, 7, 16, 62])
def test_every_node_follows_its_parent(shape, nodes):
    """Of nodes that exist and have a query below them, or are one; in few slots."""
    rng, trees = np.random.default_rng(nodes), 20
    parents = np.array(
        [[-1, *(int(SHAPES[shape](rng, i)) for i in range(1, nodes))] for _ in range(trees)]
    )
    mask = ancestor_mask(parents)
    exists = (mask <= (rng.random((trees, 1, nodes)) < 0.9)).all(axis=2)  # or one above does not
    exists[::2] = True
    rows = np.tril(rng.random(mask.shape) < 0.5, -1)  # of nodes that do not exist: arbitrary
    mask = np.where(exists[:, :, None], mask, rows)
    visits = jax.jit(walk.visits, static_argnums=1)
    for queries in {1, nodes // 2 + 1, nodes}:
        table = np.asarray(visits(mask, queries))
        assert table.shape == (trees, nodes + 2)
        for tree, (count, *codes) in enumerate(table):
            kept, before, visited = {}, -1, []
            for code in codes[:count]:
                node, pop, push = (int(number) for number in walk.visit(code))
                assert (kept.get(pop, -1) if pop else before) == parents[tree, node]
                assert max(pop, push) <= walk.slots(nodes)
                if push:
                    kept[push] = node
                before = node
                visited.append(node)
            is_query = exists[tree] & (np.arange(nodes) >= nodes - queries)
            assert sorted(visited) == np.flatnonzero(mask[tree][is_query].any(axis=0)).tolist()
            # Others follow without slots, and one more to load ahead.
            assert sorted([*visited, *codes[count:-1]]) == [*range(nodes)]
            assert codes[-1] == 0


def test_steps_of_paths():
    path = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    want = [[3, 0, 2, 3, 0, 0], [0] * 6, [4, 0, 1, 2, 3, 0]]
    np.testing.assert_array_equal(walk.steps(path), want)
