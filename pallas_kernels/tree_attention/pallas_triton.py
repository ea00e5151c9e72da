"""`tree_attention` as one Pallas-Triton kernel over a long cache, and a small sum of its parts.

Passes: a program handles one row of the batch, one key and value head, one block of its queries,
and one share of the cache. The query heads that use the same keys are rows of one product, so keys
and values are read once for all of them, as stored. The shares of a cache are interleaved: with
`splits = 3` the first program reads blocks 0, 3, 6, ... So they are equal whatever the row's
length, and nothing behind that length is read. The last share, never the longest, also gets the
tree's nodes. A softmax over blocks is kept with a running maximum. If there is more than one share,
sums, totals and maxima are written in float32 and combined by XLA.

Numerics: scores, weights and sums in float32; products as `triton_backend.dot` says. Weights are
not rounded to bf16. Masked before exp; a query that sees nothing gets zeros.

Refuses head sizes E that are not powers of two from 16 to 128. Any numbers of queries and nodes,
and any capacity of the cache, also 0.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_backend as tb
from pallas_kernels.tree_attention.config import BlockSizes, block_sizes

LARGEST_HEAD = 128  # of 256, full float32 products spill

# Of a maximum over nothing. Finite, so that the difference of two of them is no NaN.
_NOTHING = float(jnp.finfo(jnp.float32).min)


def unsupported(head_dim: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if head_dim > LARGEST_HEAD:
        return f"head_dim = {head_dim} is more than {LARGEST_HEAD}"
    return tb.unsupported_size("head_dim", head_dim)


def tree_attention(
    query,
    node_keys,
    node_values,
    keys,
    values,
    length,
    mask,
    *,
    scale: float,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.tree_attention`."""
    batch, num_queries, num_heads, head_dim = query.shape
    num_nodes, num_groups = node_keys.shape[1:3]
    capacity = keys.shape[2]
    per_group = num_heads // num_groups
    num_rows = num_queries * per_group
    blocks = blocks or block_sizes(
        query.dtype,
        num_rows=num_rows,
        num_groups=batch * num_groups,
        capacity=capacity,
    )
    block_rows = min(blocks.rows, tb.padded_size(num_rows))
    splits = blocks.splits if capacity else 1

    of_queries = pl.BlockSpec(
        (None, num_queries, per_group, head_dim), lambda i, k, u, b: (b, 0, u, 0)
    )
    of_nodes = pl.BlockSpec((None, num_nodes, None, head_dim), lambda i, k, u, b: (b, 0, u, 0))
    in_cache = pl.BlockSpec((None, None, capacity, head_dim), lambda i, k, u, b: (b, u, 0, 0))
    cache = [keys, values] if capacity else []
    out_shape = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    out_specs = [of_queries]
    if splits > 1:
        parts = (batch, splits, num_queries, num_heads)
        shapes = [(*parts, head_dim), parts, parts]
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        of_part = pl.BlockSpec(
            (None, None, num_queries, per_group), lambda i, k, u, b: (b, k, 0, u)
        )
        out_specs = [
            pl.BlockSpec(
                (None, None, num_queries, per_group, head_dim), lambda i, k, u, b: (b, k, 0, u, 0)
            ),
            of_part,
            of_part,
        ]

    parts = tb.call(
        functools.partial(
            _kernel,
            scale=scale,
            splits=splits,
            block_rows=block_rows,
            # The nodes may be few where the cache is long.
            block_cache=min(blocks.keys, tb.padded_size(capacity)) if capacity else 0,
            block_nodes=min(blocks.keys, tb.padded_size(num_nodes)),
        ),
        name="tree_attention",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(pl.cdiv(num_rows, block_rows), splits, num_groups, batch),
        in_specs=[
            of_queries,
            of_nodes,
            of_nodes,
            pl.BlockSpec((None,), lambda i, k, u, b: (b,)),
            pl.BlockSpec((None, num_queries, num_nodes), lambda i, k, u, b: (b, 0, 0)),
            *(in_cache for _ in cache),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
    )(query, node_keys, node_values, length, mask, *cache)
    return _combined(*parts).astype(query.dtype) if splits > 1 else parts[0]


def _combined(sums, totals, maxima):
    """The softmax over all shares `[B, Q, W, E]`; each is relative to its own maximum."""
    weight = jnp.exp(maxima - maxima.max(axis=1, keepdims=True))
    total = (totals * weight).sum(axis=1)
    output = (sums * weight[..., None]).sum(axis=1)
    return output / jnp.maximum(total, 1.0)[..., None]


def _kernel(
    query_ref,  # [Q, W/U, E]
    node_keys_ref,  # [N, E]
    node_values_ref,  # [N, E]
    length_ref,  # []
    mask_ref,  # [Q, N]
    *refs,  # keys and values of the cache [L, E], if there is one; outputs
    scale: float,
    splits: int,
    block_rows: int,
    block_cache: int,
    block_nodes: int,
):
    cache_refs, out_refs = (refs[:2], refs[2:]) if block_cache else ((), refs)
    num_queries, per_group, head_dim = query_ref.shape
    num_nodes = node_keys_ref.shape[0]
    split = pl.program_id(1)

    # Row r of a group's product is query r // (W/U) with head r % (W/U).
    row, _ = tb.rows(pl.program_id(0) * block_rows, block_rows, num_queries * per_group)
    query_index, head = lax.div(row, per_group), lax.rem(row, per_group)
    query = query_ref[query_index, head, :]

    def attend(carry, keys, values, seen):
        sums, total, maximum = carry
        scores = tb.dot(query, keys, trans_b=True) * scale
        scores = jnp.where(seen, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        weight = jnp.exp(scores - new_maximum[:, None])
        shrink = jnp.exp(maximum - new_maximum)
        sums = sums * shrink[:, None] + tb.dot(weight, values)
        return sums, total * shrink + jnp.sum(weight, axis=1), new_maximum

    carry = (
        jnp.zeros((block_rows, head_dim), jnp.float32),
        jnp.zeros((block_rows,), jnp.float32),
        jnp.full((block_rows,), _NOTHING, jnp.float32),
    )

    if block_cache:
        keys_ref, values_ref = cache_refs
        length = jnp.minimum(length_ref[...], keys_ref.shape[0])
        num_blocks = lax.div(length + block_cache - 1, block_cache)

        def from_cache(i, carry):
            first = (split + i * splits) * block_cache
            place, exists = tb.rows(first, block_cache, keys_ref.shape[0])
            seen = (exists & (place < length))[None, :]
            return attend(carry, keys_ref[place, :], values_ref[place, :], seen)

        # Blocks split, split + splits, ... below num_blocks.
        carry = lax.fori_loop(
            0, lax.div(num_blocks - split + splits - 1, splits), from_cache, carry
        )

    def from_nodes(j, carry):
        node, exists = tb.rows(j * block_nodes, block_nodes, num_nodes)
        seen = mask_ref[query_index[:, None], node[None, :]] & exists[None, :]
        return attend(carry, node_keys_ref[node, :], node_values_ref[node, :], seen)

    num_node_blocks = pl.cdiv(num_nodes, block_nodes)
    if splits > 1:  # no block of nodes for the others
        num_node_blocks = num_node_blocks * (split == splits - 1).astype(jnp.int32)
    sums, total, maximum = lax.fori_loop(0, num_node_blocks, from_nodes, carry)

    if splits == 1:
        # A total is at least 1, the weight of the maximum, or nothing was seen.
        output = sums / jnp.maximum(total, 1.0)[:, None]
        out_refs[0][query_index, head, :] = output.astype(out_refs[0].dtype)
    else:
        for ref, value in zip(out_refs, (sums, total, maximum), strict=True):
            index = (query_index, head, slice(None)) if value.ndim == 2 else (query_index, head)
            ref[index] = value
