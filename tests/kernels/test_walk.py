"""The order in which kernels visit trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import walk
from tests.cases.base import ancestor_mask


@pytest.mark.parametrize("nodes", [1, 7, 16, 62])
def test_every_node_follows_its_parent(nodes):
    """Of nodes that exist and have a query below them, or are one; in few slots."""
    rng, queries = np.random.default_rng(nodes), nodes // 2 + 1
    # Chains, bushes with several roots, and a full binary tree.
    parents = [[rng.integers(max(-1, i - 1 - t), i) for i in range(nodes)] for t in range(40)]
    parents = np.array([*parents, (np.arange(nodes) - 1) // 2])
    mask = ancestor_mask(parents)
    exists = (mask <= (rng.random((41, 1, nodes)) < 0.9)).all(axis=2) | (parents < 2)
    mask = np.where(exists[:, :, None], mask, np.tril(rng.random(mask.shape) < 0.5, -1))
    table = walk.visits(jnp.asarray(mask), queries)
    for tree, (_, *codes) in enumerate(np.stack(walk.visit(table), axis=-1).tolist()):
        count = int(table[tree, 0])
        kept, before, visited = {}, -1, []
        for node, pop, push in codes[:count]:
            assert (kept.get(pop, -1) if pop else before) == parents[tree, node]
            assert max(pop, push) <= walk.slots(nodes)
            kept |= {push: node}
            before = node
            visited.append(node)
        is_query = exists[tree] & (np.arange(nodes) >= nodes - queries)
        assert sorted(visited) == np.flatnonzero(mask[tree][is_query].any(axis=0)).tolist()
        left_out = [node for node, _, _ in codes[count:]]
        assert sorted([*visited, *left_out]) == [0, *range(nodes)]
