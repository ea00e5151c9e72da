"""Specification of `tree_attention`: one query and one head at a time."""

import numpy as np


def tree_attention(query, node_keys, node_values, keys, values, length, mask, *, scale):
    """Softmax attention of each query to the cache's first `length` places and to its nodes.

    Args:
        query: `[B, Q, W, E]`. node_keys, node_values: `[B, N, U, E]`. keys, values: `[B, U, L, E]`.
        length: `[B]`. mask: `[B, Q, N]` bool, every row with at least one True. scale: a number.

    Returns:
        `[B, Q, W, E]`.
    """
    batch, num_queries, num_heads, _ = query.shape
    heads_per_group = num_heads // node_keys.shape[2]
    output = np.zeros_like(query)
    for b in range(batch):
        for i in range(num_queries):
            for w in range(num_heads):
                u = w // heads_per_group
                seen_keys = [*keys[b, u, : length[b]], *node_keys[b, mask[b, i], u]]
                seen_values = [*values[b, u, : length[b]], *node_values[b, mask[b, i], u]]
                scores = np.array([scale * (query[b, i, w] @ key) for key in seen_keys])
                weights = np.exp(scores - scores.max())
                output[b, i, w] = weights @ np.array(seen_values) / weights.sum()
    return output
