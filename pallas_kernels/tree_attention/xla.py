"""`tree_attention` and `tree_attention_layer` as XLA operations.

Scores over the nodes and over the cache are two products with one softmax. A long cache is read
block by block, and only up to the length of the longest row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import batched_product
from pallas_kernels.tree_attention.kv_cache import KVCache, NodeKV, replay_kv
from pallas_kernels.tree_attention.layout import AttentionLayout, HeadNorms

# Score of masked keys. Finite, so that a fully masked query gives no NaN, which would
# spread to others as 0 * NaN. Far below any score: next to one that is seen, exp gives exactly 0.
_MASKED = float(jnp.finfo(jnp.float32).min)

BLOCK = 512  # cache positions

# Of some keys: maximum of the scores, sum of the weights, weighted sum of the values.
PartialSoftmax = tuple[jax.Array, jax.Array, jax.Array]


def tree_attention(
    *arrays: jax.Array, scale: float, window: int | None = None, is_block: bool = False
) -> jax.Array:
    """See `api.tree_attention`, whose arrays these are."""
    query, node_keys, node_values, keys, values, length, mask = arrays
    cache_mask = None
    if window is not None:
        mask, cache_mask, length = _in_window(mask, length, keys.shape[2], window, is_block)
    batch, num_queries, num_heads, head_dim = query.shape
    num_groups = node_keys.shape[2]
    per_group = num_heads // num_groups

    # The query heads that share a key head are rows of one product: keys are not repeated.
    grouped = query.reshape(batch, num_queries, num_groups, per_group, head_dim)
    rows = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, num_groups, -1, head_dim)

    row_mask = jnp.tile(mask[:, None], (1, 1, per_group, 1))
    softmax = _softmax(rows, node_keys.swapaxes(1, 2), node_values.swapaxes(1, 2), row_mask, scale)
    capacity = keys.shape[2]
    in_cache = None if cache_mask is None else jnp.tile(cache_mask[:, None], (1, 1, per_group, 1))
    if capacity > 2 * BLOCK:
        # Block by block up to the longest row: temporary memory does not grow with the capacity.
        def add_block(i: jax.Array, softmax: PartialSoftmax) -> PartialSoftmax:
            # The last block starts early enough to end with the cache. Places that the block before
            # it had are masked out.
            start = jnp.minimum(i * BLOCK, capacity - BLOCK)
            positions = start + jnp.arange(BLOCK, dtype=jnp.int32)[None]
            seen = (positions >= i * BLOCK) & (positions < length[:, None])
            seen = seen[:, None, None]
            if in_cache is not None:
                seen = seen & lax.dynamic_slice_in_dim(in_cache, start, BLOCK, axis=3)
            some_keys = lax.dynamic_slice_in_dim(keys, start, BLOCK, axis=2)
            some_values = lax.dynamic_slice_in_dim(values, start, BLOCK, axis=2)
            return _merged(softmax, _softmax(rows, some_keys, some_values, seen, scale))

        softmax = lax.fori_loop(0, -(-length.max() // BLOCK), add_block, softmax)
    elif capacity:
        seen = (jnp.arange(capacity, dtype=jnp.int32)[None] < length[:, None])[:, None, None]
        seen = seen if in_cache is None else seen & in_cache
        softmax = _merged(softmax, _softmax(rows, keys, values, seen, scale))
    _, total, output = softmax
    output = (output / total[..., None]).astype(query.dtype)
    output = output.reshape(batch, num_groups, per_group, num_queries, head_dim)
    return output.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _in_window(
    mask: jax.Array, length: jax.Array, capacity: int, window: int, is_block: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which nodes and which places of a ring are in the window; how many places have tokens."""
    before = jnp.cumsum(mask, axis=2, dtype=jnp.int32)  # of each node on the path, and itself
    places = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :, None]
    depth = places if is_block else before[:, :, -1:] - 1
    # The position of the token at each place; negative where there is none yet.
    last = length[:, None] - 1
    held = last - (last - jnp.arange(capacity, dtype=jnp.int32)[None]) % max(capacity, 1)
    oldest = length[:, None, None] + depth - window + 1
    in_cache = (held >= 0)[:, None] & (held[:, None] >= oldest)
    mask &= is_block | (before - 1 > depth - window)
    return mask, in_cache, jnp.minimum(length, capacity)


def _softmax(
    rows: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, scale: float
) -> PartialSoftmax:
    """The softmax of rows `[B, U, rows, E]` over some keys and values, not yet normalised."""
    scores = batched_product(rows, keys.astype(rows.dtype), transpose_right=True)
    scores = jnp.where(seen, scale * scores, _MASKED)
    maximum = scores.max(axis=-1)
    weights = jnp.exp(scores - maximum[..., None])
    return maximum, weights.sum(axis=-1), batched_product(weights.astype(values.dtype), values)


def _merged(left: PartialSoftmax, right: PartialSoftmax) -> PartialSoftmax:
    """The softmax over the keys of both."""
    maximum = jnp.maximum(left[0], right[0])
    a, b = jnp.exp(left[0] - maximum), jnp.exp(right[0] - maximum)
    return (
        maximum,
        a * left[1] + b * right[1],
        a[..., None] * left[2] + b[..., None] * right[2],
    )


def tree_attention_layer(
    projected: jax.Array,
    cache: KVCache,
    depth: jax.Array,
    mask: jax.Array,
    *,
    layout: AttentionLayout,
    prefix_pending: NodeKV | None,
    previous: tuple[NodeKV, jax.Array] | None,
    norms: HeadNorms | None,
    implementation: str | None,
    attention: Callable[..., jax.Array],
) -> tuple[jax.Array, NodeKV, KVCache]:
    """See `api.tree_attention_layer`; `attention` is `tree_attention`, in this implementation."""
    if previous is not None:
        cache = replay_kv(cache, *previous)
    keys, values, length = cache
    query, *new = layout.split(projected, length[:, None] + depth, norms, implementation)
    if prefix_pending is not None:
        new = [jnp.concatenate(both, axis=1) for both in zip(prefix_pending, new, strict=True)]
    y = attention(query, *new, keys, values, length, mask, scale=layout.scale)
    # The cache is overfull: tokens were dropped, so no output is right.
    full = length > keys.shape[2]
    y = jnp.where(full[:, None, None, None], jnp.nan, y)
    return y, NodeKV(*new), cache
