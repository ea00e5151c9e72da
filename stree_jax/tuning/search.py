"""From ranks and costs to trees: the acceptance of a tree, and the trees worth timing."""

import heapq

import numpy as np

from stree_jax.array_types import Float
from stree_jax.measuring.costs import Costs
from stree_jax.tree import TreeTopology
from stree_jax.tuning.trace import RankTrace


def replay_tau(topology: TreeTopology, trace: RankTrace) -> float:
    """Returns tokens per target call of the traced texts, exactly."""
    children = topology.level_order().children
    calls = 0
    for ranks in trace.ranks:
        at = 0
        while at < len(ranks):
            start, node = at, 0
            while at < len(ranks):
                rank = _column(ranks, at - start, trace.num_ranks)[start]
                if rank >= min(len(children[node]), trace.num_ranks):
                    break
                node = children[node][rank]
                at += 1
            at += 1  # the target's own token, unless the text ended before it
            calls += 1
    return sum(map(len, trace.ranks)) / calls


def acceptance(trace: RankTrace, max_depth: int) -> Float[np.ndarray, "D ranks"]:
    """Acceptance rate of the child of each rank given its parent, by the parent's depth."""
    table = np.zeros((max_depth, trace.num_ranks))
    for depth in range(max_depth):
        taken = np.zeros(trace.num_ranks + 1)
        for ranks in trace.ranks:
            count = max(len(ranks) - depth, 0)
            reached = np.ones(count, bool)
            for above in range(depth):
                reached &= _column(ranks, above, trace.num_ranks)[:count] < trace.num_ranks
            column = _column(ranks, depth, trace.num_ranks)[:count]
            taken += np.bincount(column[reached], minlength=trace.num_ranks + 1)
        table[depth] = taken[:-1] / max(taken.sum(), 1)
    return table


def _column(ranks: np.ndarray, depth: int, none: int) -> np.ndarray:
    """Ranks of the tokens that come `depth` after each start of a step."""
    if ranks.ndim == 1:
        return ranks[depth:]
    return ranks[:, depth] if depth < ranks.shape[1] else np.full(len(ranks), none)


def best_trees(
    accept: Float[np.ndarray, "D ranks"], costs: Costs, max_nodes: int, max_depth: int
) -> list[TreeTopology]:
    """Returns the best tree of each size and depth, the fastest first.

    In order of probability nodes make a tree: none is above its parent or an earlier sibling.
    """
    predicted: dict[TreeTopology, float] = {}
    for depth in range(1, min(max_depth, len(accept)) + 1):
        tau = 1.0
        parents = [-1]
        # Negative probability, insertion order, parent, its depth, rank, the parent's probability.
        heap = [(-accept[0, 0], 0, 0, 0, 0, 1.0)]
        while heap and len(parents) < max_nodes:
            negative, _, parent, parent_depth, rank, above = heapq.heappop(heap)
            if negative == 0:
                break
            node = len(parents)
            parents.append(parent)
            tau -= negative
            if rank + 1 < accept.shape[1]:
                prob = above * accept[parent_depth, rank + 1]
                heapq.heappush(heap, (-prob, 2 * node, parent, parent_depth, rank + 1, above))
            if parent_depth + 1 < depth:
                prob = -negative * accept[parent_depth + 1, 0]
                heapq.heappush(heap, (-prob, 2 * node + 1, node, parent_depth + 1, 0, -negative))
            topology = TreeTopology.from_parents(parents).level_order()
            predicted[topology] = tau / costs.step(topology)
    return sorted(predicted, key=lambda topology: -predicted[topology])
