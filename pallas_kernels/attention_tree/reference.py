"""Specification of `attention_tree`: the parts of the layer one after the other, node by node."""

import numpy as np

from pallas_kernels.tree_attention.reference import tree_attention


def attention_tree(projected, cache, depth, mask, *, layout, previous):
    """A whole tree after the accepted path of the previous one.

    Args:
        projected: `[B, N, X]`, columns as `layout` says.
        cache: keys and values `[B, U, L, E]` and length `[B]`, before the root of the previous
            tree.
        depth: `[B, N]`, of this tree.
        mask: `[B, N, N]`, the ancestors of each node.
        layout: an `AttentionLayout`.
        previous: keys and values `[B, O, U, E]` of the previous tree, and its path `[B, O]`.

    Returns:
        outputs `[B, N, W, E]`, keys and values `[B, N, U, E]` of the tree, and the cache before its
        root. The outputs of a row with more tokens than places are NaN.
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

    heads = projected[..., : layout.num_columns].reshape(*projected.shape[:2], -1, layout.head_dim)
    before_values = layout.num_heads + layout.num_groups
    query = heads[:, :, : layout.num_heads]
    node_keys = heads[:, :, layout.num_heads : before_values] * layout.key_multiplier
    node_values = heads[:, :, before_values:]
    positions = length[:, None] + depth
    query, node_keys = rotated(query, positions, layout), rotated(node_keys, positions, layout)

    full = length > capacity
    y = tree_attention(
        *(query, node_keys, node_values, keys, values, np.minimum(length, capacity), mask),
        scale=layout.scale,
    )
    y[full] = np.nan
    return y, (node_keys, node_values), (keys, values, length)


def rotated(x, positions, layout):
    """Rotary embedding of heads `[B, N, W, E]`: each pair of channels turns as a complex number.

    The angle is a float32 by definition, as it is where models are trained.
    """
    half = len(layout.frequencies)
    angles = positions.astype(np.float32)[..., None] * np.array(layout.frequencies, np.float32)
    turn = np.exp(1j * angles.astype(np.float64))[:, :, None]
    pair = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([pair.real, pair.imag, x[..., 2 * half :]], axis=-1)
