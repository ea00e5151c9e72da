"""`attention_tree` as its parts, of which the attention chooses its implementation."""

import jax.numpy as jnp

from pallas_kernels.attention_tree.keys import NodeKeys, replay_keys
from pallas_kernels.tree_attention.api import tree_attention


def attention_tree(projected, cache, depth, mask, *, layout, grown, previous, implementation):
    """See `api.attention_tree`."""
    if previous is not None:
        cache = replay_keys(cache, *previous)
    keys, values, length = cache
    query, *new = layout.split(projected, length[:, None] + depth)
    if grown is not None:
        new = [jnp.concatenate(both, axis=1) for both in zip(grown, new, strict=True)]
    y = tree_attention(
        *(query, *new, keys, values, length, mask),
        scale=layout.scale,
        implementation=implementation,
    )
    # More tokens than places: some were dropped, and no output would be right.
    full = length > keys.shape[2]
    y = jnp.where(full[:, None, None, None], jnp.nan, y)
    return y, NodeKeys(*new), cache
