"""`tree_attention` as products over the nodes and over the cache, softmaxed together.

A long cache is read block by block, and only as far as the longest row.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import batched_product

# Of what is not seen. Finite, so that a query that sees nothing gives no NaN: those would reach
# others as 0 * NaN. Far below any score, so that exp gives an exact 0 beside one that is seen.
_UNSEEN = float(jnp.finfo(jnp.float32).min)

_BLOCK = 512  # places


def tree_attention(query, node_keys, node_values, keys, values, length, mask, *, scale):
    """See `api.tree_attention`."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_groups = node_keys.shape[2]
    per_group = num_heads // num_groups

    # The query heads of a group become rows of one product: keys are not repeated.
    grouped = query.reshape(batch, num_queries, num_groups, per_group, head_dim)
    rows = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, num_groups, -1, head_dim)

    own = jnp.tile(mask[:, None], (1, 1, per_group, 1))
    sums = _part(rows, node_keys.swapaxes(1, 2), node_values.swapaxes(1, 2), own, scale)
    capacity = keys.shape[2]
    if capacity > 2 * _BLOCK:
        # Block by block, as far as the longest row: no memory grows with the capacity.
        def from_block(i, sums):
            # The last block is moved back to end with the cache; what it repeats is not seen twice.
            start = jnp.minimum(i * _BLOCK, capacity - _BLOCK)
            places = start + jnp.arange(_BLOCK)
            seen = (places >= i * _BLOCK) & (places < length[:, None])
            block = [lax.dynamic_slice_in_dim(x, start, _BLOCK, axis=2) for x in (keys, values)]
            return _together(sums, _part(rows, block[0], block[1], seen[:, None, None], scale))

        sums = lax.fori_loop(0, -(-length.max() // _BLOCK), from_block, sums)
    elif capacity:
        seen = jnp.arange(capacity) < length[:, None]
        sums = _together(sums, _part(rows, keys, values, seen[:, None, None], scale))
    _, total, output = sums
    output = (output / total[..., None]).astype(query.dtype)
    output = output.reshape(batch, num_groups, per_group, num_queries, head_dim)
    return output.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _part(rows, keys, values, seen, scale):
    """Maximum of the scores, sum of the weights and weighted sum of values, over some places."""
    scores = batched_product(rows, keys.astype(rows.dtype), transpose_right=True)
    scores = jnp.where(seen, scale * scores, _UNSEEN)
    best = scores.max(axis=-1)
    weights = jnp.exp(scores - best[..., None])
    return best, weights.sum(axis=-1), batched_product(weights.astype(values.dtype), values)


def _together(left, right):
    """The same of both."""
    best = jnp.maximum(left[0], right[0])
    a, b = jnp.exp(left[0] - best), jnp.exp(right[0] - best)
    return best, a * left[1] + b * right[1], a[..., None] * left[2] + b[..., None] * right[2]
