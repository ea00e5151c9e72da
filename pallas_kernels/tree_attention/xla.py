"""`tree_attention` as two products over the cache and two over the nodes, softmaxed together."""

import jax.numpy as jnp

from pallas_kernels.numerics import batched_product

# Of what is not seen. Finite, so that a query that sees nothing gives no NaN: those would reach
# others as 0 * NaN. Far below any score, so that exp gives an exact 0 beside one that is seen.
_UNSEEN = float(jnp.finfo(jnp.float32).min)


def tree_attention(query, node_keys, node_values, keys, values, length, mask, *, scale):
    """See `api.tree_attention`."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_groups = node_keys.shape[2]
    per_group = num_heads // num_groups

    # The query heads of a group become rows of one product: keys are not repeated.
    grouped = query.reshape(batch, num_queries, num_groups, per_group, head_dim)
    rows = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, num_groups, -1, head_dim)

    parts = []
    if capacity := keys.shape[2]:
        parts.append((keys, values, (jnp.arange(capacity) < length[:, None])[:, None, None]))
    own = jnp.tile(mask[:, None], (1, 1, per_group, 1))
    parts.append((node_keys.swapaxes(1, 2), node_values.swapaxes(1, 2), own))

    scores = [
        jnp.where(
            seen, scale * batched_product(rows, k.astype(rows.dtype), transpose_right=True), _UNSEEN
        )
        for k, _, seen in parts
    ]
    best = scores[0].max(axis=-1)
    for part in scores[1:]:
        best = jnp.maximum(best, part.max(axis=-1))
    weights = [jnp.exp(part - best[..., None]) for part in scores]
    total = jnp.stack([part.sum(axis=-1) for part in weights]).sum(axis=0)
    sums = [
        batched_product(weight.astype(v.dtype), v)
        for weight, (_, v, _) in zip(weights, parts, strict=True)
    ]
    output = (sum(sums[1:], sums[0]) / total[..., None]).astype(query.dtype)
    output = output.reshape(batch, num_groups, per_group, num_queries, head_dim)
    return output.transpose(0, 3, 1, 2, 4).reshape(query.shape)
