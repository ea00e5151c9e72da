"""Specifications of `tree_attention` and `tree_attention_layer`: one row and head at a time."""

import numpy as np


def tree_attention(
    query, node_keys, node_values, keys, values, length, mask, *, scale, window=None, is_block=False
):
    """Softmax attention of each query to the first `length` cache positions and to its nodes.

    From query `[B, Q, W, E]`, nodes `[B, N, U, E]`, a cache `[B, U, L, E]`, length `[B]` and mask
    `[B, Q, N]`, every row with at least one True. With a window the cache is a ring, and a query
    sees the last `window` tokens of its path. A block's queries are places in a row.
    """
    batch, _, num_heads, _ = query.shape
    heads_per_group = num_heads // node_keys.shape[2]
    capacity = keys.shape[2]
    output = np.zeros_like(query)
    for b in range(batch):
        first = 0 if window is None else max(0, length[b] - capacity)
        tokens = np.arange(first, length[b])
        places = tokens % max(capacity, 1)
        rank = length[b] + np.cumsum(mask[b], axis=1) - 1  # position of each node on the path
        place = length[b] + np.arange(len(mask[b]))[:, None] if is_block else rank[:, -1:]
        oldest = 0 if window is None else place - window + 1
        seen = np.concatenate(
            [tokens >= np.broadcast_to(oldest, (len(mask[b]), 1)), mask[b]], axis=1
        )
        seen[:, len(tokens) :] &= is_block | (rank >= oldest)
        for w in range(num_heads):
            u = w // heads_per_group
            seen_keys = np.concatenate([keys[b, u, places], node_keys[b, :, u]])
            seen_values = np.concatenate([values[b, u, places], node_values[b, :, u]])
            scores = np.where(seen, scale * (query[b, :, w] @ seen_keys.T), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            output[b, :, w] = weights @ seen_values / weights.sum(axis=1, keepdims=True)
    return output


def tree_attention_layer(projected, cache, depth, mask, *, layout, norms, previous):
    """Outputs `[B, N, W, E]` of a tree, its keys and values `[B, N, U, E]`, and the cache before.

    `cache` is keys, values and length before the previous tree's root, and `previous` its keys,
    values `[B, O, U, E]` and path `[B, O]`. Norms are weights `[E]` of queries and of keys, and an
    epsilon; or None. The outputs of a row whose cache is overfull are NaN.
    """
    keys, values, length = (np.copy(array) for array in cache)
    old_keys, old_values, path = previous
    batch, capacity = keys.shape[0], keys.shape[2]
    for b in range(batch):
        for node in np.flatnonzero(path[b]):
            if length[b] < capacity:
                keys[b, :, length[b]] = old_keys[b, node]
                values[b, :, length[b]] = old_values[b, node]
            length[b] += 1

    columns = slice(layout.first_column, layout.first_column + layout.num_columns)
    heads = projected[..., columns].reshape(*projected.shape[:2], -1, layout.head_dim)
    first_value = layout.num_heads + layout.num_groups
    query, node_keys = heads[:, :, : layout.num_heads], heads[:, :, layout.num_heads : first_value]
    if norms is not None:
        of_query, of_keys, epsilon = norms
        query, node_keys = normed(query, of_query, epsilon), normed(node_keys, of_keys, epsilon)
    node_keys = node_keys * layout.key_multiplier
    node_values = heads[:, :, first_value:]
    positions = length[:, None] + depth
    query, node_keys = rotated(query, positions, layout), rotated(node_keys, positions, layout)

    full = length > capacity
    y = tree_attention(
        *(query, node_keys, node_values, keys, values, np.minimum(length, capacity), mask),
        scale=layout.scale,
    )
    y[full] = np.nan
    return y, (node_keys, node_values), (keys, values, length)


def normed(x, weight, epsilon):
    """Root-mean-square norm of each head."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


def rotated(x, positions, layout):
    """Rotary embedding of heads `[B, N, W, E]`: a pair of channels is a complex number.

    Angles are float32 by definition, as in training.
    """
    half = len(layout.frequencies)
    angles = positions.astype(np.float32)[..., None] * np.array(layout.frequencies, np.float32)
    rotation = np.exp(1j * angles.astype(np.float64))[:, :, None]
    pair = (x[..., :half] + 1j * x[..., half : 2 * half]) * rotation
    return np.concatenate([pair.real, pair.imag, x[..., 2 * half :]], axis=-1)
