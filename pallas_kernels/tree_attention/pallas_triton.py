"""`tree_attention` as one Pallas-Triton kernel over a long cache, and one that adds up its parts.

Passes: a program handles one row of the batch, one key and value head, one block of its queries,
and one share of the cache. The query heads that use the same keys are rows of one product, so keys
and values are read once for each block of them, as stored. The shares of a cache are interleaved:
with `splits = 3` the first program reads blocks 0, 3, 6, ... So they are equal whatever the row's
length, and nothing behind that length is read. The last share, never the longest, also gets the
tree's nodes. A softmax over blocks is kept with a running maximum. If there is more than one share,
sums, totals and maxima are written in float32, and a second kernel combines them.

Numerics: scores, weights and sums in float32; products as `triton.dot` says. Weights are
not rounded to bf16. Masked before exp; a query that sees nothing gets zeros.

Triton's blocks are powers of two, and heads of 160 or 224 (Zamba2) are not: a head is a few of
them, the largest first. Refuses head sizes E that are no multiple of 16, or more than 256. Any
numbers of queries and nodes, and any capacity of the cache, also 0. Has no gradient of its own; see
`api.tree_attention`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.tree_attention.config import BlockSizes, block_sizes

LARGEST_HEAD = 256
_LARGEST_PART = 128  # of a head, in one product

# Of a maximum over nothing. Finite, so that the difference of two of them is no NaN.
_NOTHING = float(jnp.finfo(jnp.float32).min)


def unsupported(head_dim: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if head_dim > LARGEST_HEAD:
        return f"head_dim = {head_dim} is more than {LARGEST_HEAD}"
    return tb.unsupported_in_parts("head_dim", head_dim)


def channels(count: int) -> list[pl.Slice]:
    """`range(count)` of the channels of a head, in parts that Triton can load.

    Worked example, `channels(224)`: 128, 64 and 32 of them.
    """
    return tb.parts(count, _LARGEST_PART)


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
        head_dim=head_dim,
    )
    block_rows = min(blocks.rows, tb.padded_size(num_rows))
    splits = blocks.splits if capacity else 1

    of_queries = query_block(num_queries, per_group, head_dim)
    of_nodes = pl.BlockSpec((None, num_nodes, None, head_dim), lambda i, k, u, b: (b, 0, u, 0))
    in_cache = pl.BlockSpec((None, None, capacity, head_dim), lambda i, k, u, b: (b, u, 0, 0))
    cache = [keys, values] if capacity else []
    results = outputs(query, per_group, splits)
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
        out_specs={name: spec for name, (_, spec) in results.items()},
        out_shape={name: shape for name, (shape, _) in results.items()},
    )(query, node_keys, node_values, length, mask, *cache)
    return combined([parts[name] for name in results], query.dtype, interpret=interpret)


def query_block(num_queries: int, per_group: int, head_dim: int) -> pl.BlockSpec:
    """The query heads of a program's group, of `[B, Q, W, E]`."""
    return pl.BlockSpec((None, num_queries, per_group, head_dim), lambda i, k, u, b: (b, 0, u, 0))


def outputs(query, per_group: int, splits: int):
    """What programs write, by name: shape and block; the order is that of `combined`."""
    batch, num_queries, num_heads, head_dim = query.shape
    if splits == 1:
        of_queries = query_block(num_queries, per_group, head_dim)
        return {"y": (jax.ShapeDtypeStruct(query.shape, query.dtype), of_queries)}
    parts = (batch, splits, num_queries, num_heads)
    block = (None, None, num_queries, per_group)
    scalars = (
        jax.ShapeDtypeStruct(parts, jnp.float32),
        pl.BlockSpec(block, lambda i, k, u, b: (b, k, 0, u)),
    )
    vectors = (
        jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
        pl.BlockSpec((*block, head_dim), lambda i, k, u, b: (b, k, 0, u, 0)),
    )
    return {"sums": vectors, "total": scalars, "maximum": scalars}


def combined(parts, dtype, *, interpret: bool):
    """The softmax over all shares `[B, Q, W, E]`, each of which is relative to its own maximum.

    A kernel of its own, since all programs must have ended; a program handles one query and head.
    """
    if len(parts) == 1:
        return parts[0]
    batch, splits, num_queries, num_heads, head_dim = parts[0].shape
    shares = (None, splits, None, None)
    of_scalars = pl.BlockSpec(shares, lambda b, q, w: (b, 0, q, w))
    shape = (batch, num_queries, num_heads, head_dim)
    return tb.call(
        _combine,
        name="tree_attention_combine",
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        grid=shape[:3],
        in_specs=[
            pl.BlockSpec((*shares, head_dim), lambda b, q, w: (b, 0, q, w, 0)),
            of_scalars,
            of_scalars,
        ],
        out_specs=pl.BlockSpec((None, None, None, head_dim), lambda b, q, w: (b, q, w, 0)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
    )(*parts)


def _combine(sums_ref, totals_ref, maxima_ref, y_ref):  # [shares, E], [shares], [shares], [E]
    num_shares, head_dim = sums_ref.shape
    share, _ = tb.rows(0, tb.padded_size(num_shares), num_shares)
    maximum = jnp.max(maxima_ref[share])  # the last one once more does not matter

    def step(i, carry):
        sums, total = carry
        share, exists = tb.rows(i * tb.SMALLEST_BLOCK, tb.SMALLEST_BLOCK, num_shares)
        weight = jnp.where(exists, jnp.exp(maxima_ref[share] - maximum), 0.0)
        sums = [
            part_sums + jnp.sum(part * weight[:, None], axis=0)
            for part_sums, part in zip(sums, load(sums_ref, share), strict=True)
        ]
        return sums, total + jnp.sum(totals_ref[share] * weight)

    no_sums = [jnp.zeros((part.size,), jnp.float32) for part in channels(head_dim)]
    nothing = (no_sums, jnp.zeros((), jnp.float32))
    sums, total = lax.fori_loop(0, pl.cdiv(num_shares, tb.SMALLEST_BLOCK), step, nothing)
    store(y_ref, (), [value / jnp.maximum(total, 1.0) for value in sums])


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
    *cache_refs, output_refs = refs
    num_queries, per_group, head_dim = query_ref.shape
    share = (pl.program_id(1), splits)

    # Row r of a group's product is query r // (W/U) with head r % (W/U).
    row_block = (pl.program_id(0) * block_rows, block_rows)
    row, _ = tb.rows(*row_block, num_queries * per_group)
    query, head = lax.div(row, per_group), lax.rem(row, per_group)
    attend_block = functools.partial(attend, load(query_ref, query, head), scale)
    carry = nothing_seen(block_rows, head_dim)
    if block_cache:
        length = jnp.minimum(length_ref[...], cache_refs[0].shape[0])
        cache = (*cache_refs, length)
        carry = attend_cache(attend_block, carry, cache, block=block_cache, share=share)
    carry = attend_nodes(
        attend_block,
        carry,
        (node_keys_ref, node_values_ref, mask_ref, query),
        last=last_query(row_block, per_group, num_queries),
        block=block_nodes,
        share=share,
    )
    write(output_refs, (query, head), carry)


def load(ref, *rows) -> list[jax.Array]:
    """Rows of heads, in the parts `channels`."""
    return [ref[(*rows, part)] for part in channels(ref.shape[-1])]


def nothing_seen(num_rows: int, head_dim: int):
    """Weighted sums of values, sum of the weights, and maximum of the scores, over nothing."""
    return (
        [jnp.zeros((num_rows, part.size), jnp.float32) for part in channels(head_dim)],
        jnp.zeros((num_rows,), jnp.float32),
        jnp.full((num_rows,), _NOTHING, jnp.float32),
    )


def attend(query, scale: float, carry, keys, values, seen):
    """The same over some more places, of which the `seen` ones count; heads as `load` has them."""
    sums, total, maximum = carry
    products = [tb.dot(q, k, trans_b=True) for q, k in zip(query, keys, strict=True)]
    scores = functools.reduce(jnp.add, products) * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
    weight = jnp.exp(scores - new_maximum[:, None])
    shrink = jnp.exp(maximum - new_maximum)
    sums = [
        part_sums * shrink[:, None] + tb.dot(weight, v)
        for part_sums, v in zip(sums, values, strict=True)
    ]
    return sums, total * shrink + jnp.sum(weight, axis=1), new_maximum


def attend_cache(attend, carry, cache, *, block: int, share: tuple):
    """The same over the first places of a cache, or a share of it.

    Args:
        attend: takes a carry, keys, values and which of them are seen.
        carry: so far.
        cache: keys, values `[L, E]` and how many places count.
        block: places at a time.
        share: which, of how many.
    """
    (keys_ref, values_ref, length), (split, splits) = cache, share
    num_blocks = lax.div(length + block - 1, block)

    def step(i, carry):
        place, exists = tb.rows((split + i * splits) * block, block, keys_ref.shape[0])
        seen = (exists & (place < length))[None, :]
        return attend(carry, load(keys_ref, place), load(values_ref, place), seen)

    # Blocks split, split + splits, ... below num_blocks.
    return lax.fori_loop(0, lax.div(num_blocks - split + splits - 1, splits), step, carry)


def last_query(rows: tuple, per_group: int, num_queries: int):
    """That of a block of rows, given by the first and the number of them."""
    first, count = rows
    return jnp.minimum(lax.div(first + count - 1, per_group), num_queries - 1)


def attend_nodes(attend, carry, nodes, *, last, block: int, share: tuple):
    """The same over the nodes of a tree, which are for the last share.

    Args:
        nodes: keys, values `[N, E]`, the mask `[Q, N]`, and the query of each row.
        last: the last of these queries, behind which none sees a node.
        attend, carry, block, share: as above.
    """
    (keys_ref, values_ref, mask_ref, query), (split, splits) = nodes, share
    num_queries, num_nodes = mask_ref.shape
    num_seen = num_nodes - num_queries + last + 1

    def step(j, carry):
        node, exists = tb.rows(j * block, block, num_nodes)
        seen = mask_ref[query[:, None], node[None, :]] & exists[None, :]
        return attend(carry, load(keys_ref, node), load(values_ref, node), seen)

    num_blocks = lax.div(num_seen + block - 1, block)
    if splits > 1:  # none for the others
        num_blocks = num_blocks * (split == splits - 1).astype(jnp.int32)
    return lax.fori_loop(0, num_blocks, step, carry)


def write(output_refs, row, carry):
    """Writes what `outputs` lists; `row` are the query and the head of each row."""
    sums, total, maximum = carry
    if "y" in output_refs:
        # A total is at least 1, the weight of the maximum, or nothing was seen.
        divisor = jnp.maximum(total, 1.0)[:, None]
        store(output_refs["y"], row, [value / divisor for value in sums])
    else:
        store(output_refs["sums"], row, sums)
        output_refs["total"][row] = total
        output_refs["maximum"][row] = maximum


def store(ref, rows: tuple, values: list[jax.Array]) -> None:
    """Writes what `load` reads, in the type of `ref`."""
    for part, value in zip(channels(ref.shape[-1]), values, strict=True):
        ref[(*rows, part)] = value.astype(ref.dtype)
