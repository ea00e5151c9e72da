"""`attention_tree` as one Pallas-Triton kernel that writes to the cache in place.

Passes: programs are those of `tree_attention`, whose code this is in part. First each rotates its
queries, and the last share of a cache the tree's keys, which go into the tree's record; from there,
which is the L1 cache mostly, it then does what `tree_attention` does. The accepted path of the
previous tree is attended to where it is, in that tree's record, and one program of each row and
head writes it behind the cache. No program has to wait: what is behind the cache's old length is
loaded with the last block, but not seen. It must be finite, though, old or new, for it is
multiplied by zero.

Numerics: those of `tree_attention`; angles, cosines and sines are float32, and what is rotated is
rounded to the type of the inputs, as it is where it is recorded.

Refuses what `tree_attention` refuses, and caches without places. Any numbers of nodes and of
rotated pairs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.attention_tree.config import BlockSizes, block_sizes
from pallas_kernels.attention_tree.keys import KeyCache, NodeKeys
from pallas_kernels.attention_tree.layout import AttentionLayout
from pallas_kernels.numerics import scaled
from pallas_kernels.tree_attention import pallas_triton as attention

BLOCK_MOVED = 16  # rows that are rotated or copied at a time: few, for cosines take registers


def unsupported(layout: AttentionLayout, capacity: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if not capacity:
        return "the cache has no places"
    return attention.unsupported(layout.head_dim)


def attention_tree(
    projected,
    cache,
    depth,
    mask,
    *,
    layout,
    grown,
    previous,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.attention_tree`."""
    batch, num_queries, num_columns = projected.shape
    num_nodes, capacity = mask.shape[2], cache.keys.shape[2]
    num_heads, num_groups, head_dim = layout.num_heads, layout.num_groups, layout.head_dim
    per_group = num_heads // num_groups
    num_rows = num_queries * per_group
    blocks = blocks or block_sizes(
        projected.dtype,
        num_rows=num_rows,
        num_groups=batch * num_groups,
        capacity=capacity,
        head_dim=head_dim,
    )
    blocks = dataclasses.replace(blocks, rows=min(blocks.rows, tb.padded_size(num_rows)))

    # Columns as heads. Cutting off what is behind them is a copy, which is seldom needed.
    if num_columns % head_dim:
        projected = projected[..., : layout.num_columns]
    heads = projected.reshape(batch, num_queries, -1, head_dim)

    def of_row(array):
        shape = array.shape[1:]
        return pl.BlockSpec((None, *shape), lambda i, k, u, b: (b,) + (0,) * len(shape))

    def of_group(length, first=0):
        return pl.BlockSpec((None, length, None, head_dim), lambda i, k, u, b: (b, 0, first + u, 0))

    of_queries = attention.query_block(num_queries, per_group, head_dim)
    in_cache = pl.BlockSpec((None, None, capacity, head_dim), lambda i, k, u, b: (b, u, 0, 0))

    inputs = {
        "query": (heads, of_queries),
        "node key": (heads, of_group(num_queries, num_heads)),
        "node value": (heads, of_group(num_queries, num_heads + num_groups)),
        "key": (cache.keys, in_cache),
        "value": (cache.values, in_cache),
        "length": (cache.length, of_row(cache.length)),
        "depth": (depth, of_row(depth)),
        "mask": (mask, of_row(mask)),
    }
    if layout.frequencies:
        frequencies = jnp.asarray(layout.frequencies, jnp.float32)
        inputs["frequencies"] = (
            frequencies,
            pl.BlockSpec(frequencies.shape, lambda i, k, u, b: (0,)),
        )
    if grown is not None:
        of_grown = of_group(grown.keys.shape[1])
        inputs |= {"grown key": (grown.keys, of_grown), "grown value": (grown.values, of_grown)}
    if previous is not None:
        old, path = previous
        nodes, count = in_order(path)
        of_old = of_group(path.shape[1])
        inputs |= {
            "old key": (old.keys, of_old),
            "old value": (old.values, of_old),
            "path": (nodes, of_row(nodes)),
            "count": (count, of_row(count)),
        }

    record = jax.ShapeDtypeStruct((batch, num_nodes, num_groups, head_dim), projected.dtype)
    y = jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), projected.dtype)
    outputs = {
        "node key": (record, of_group(num_nodes)),
        "node value": (record, of_group(num_nodes)),
    }
    results = attention.outputs(y, per_group, blocks.splits)
    outputs |= results
    if layout.frequencies:
        outputs["query"] = (y, of_queries)  # for this program itself
    if previous is not None:
        outputs |= {name: inputs[name] for name in ("key", "value", "length")}
    got = tb.call_by_name(
        functools.partial(_kernel, layout=layout, blocks=blocks, interpret=interpret),
        inputs,
        outputs,
        in_place={name: name for name in ("key", "value") if previous is not None},
        name="attention_tree",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(pl.cdiv(num_rows, blocks.rows), blocks.splits, num_groups, batch),
    )
    if previous is not None:
        cache = KeyCache(got["key"], got["value"], got["length"])
    y = attention.combined([got[name] for name in results], projected.dtype, interpret=interpret)
    return y, NodeKeys(got["node key"], got["node value"]), cache


def in_order(path):
    """The nodes of each path `[B, O]`, and how many they are `[B]`; behind them are zeros.

    The same for all layers, so that XLA makes it once.
    """
    node = jnp.arange(path.shape[1], dtype=jnp.int32)
    place = jnp.cumsum(path, axis=1, dtype=jnp.int32) - 1
    is_there = (place[:, None] == node[:, None]) & path[:, None]  # [B, place, node]
    return (is_there * node).sum(axis=2, dtype=jnp.int32), path.sum(axis=1, dtype=jnp.int32)


def _kernel(inputs, outputs, *, layout: AttentionLayout, blocks: BlockSizes, interpret: bool):
    num_queries, per_group, head_dim = inputs["query"].shape
    num_nodes = inputs["mask"].shape[1]
    num_grown = num_nodes - num_queries  # queries are the last nodes
    capacity = inputs["key"].shape[0]
    first_row = pl.program_id(0) * blocks.rows
    split = pl.program_id(1)
    is_last = split == blocks.splits - 1
    old_length = inputs["length"][...]
    count = inputs["count"][...] if "count" in inputs else 0
    length = old_length + count

    def moved(query, source, target, index, *, to=None, multiplier=1.0):
        """Rotates rows of heads to the positions of query nodes."""
        to, half = index if to is None else to, len(layout.frequencies)
        position = (length + inputs["depth"][query]).astype(jnp.float32)
        for pairs in attention.channels(half):
            angle = position[:, None] * inputs["frequencies"][pairs][None, :]
            cos, sin = jnp.cos(angle), jnp.sin(angle)
            both = [pl.ds(start + pairs.start, pairs.size) for start in (0, half)]
            first, second = (
                scaled(source[(*index, part)], multiplier).astype(jnp.float32) for part in both
            )
            target[(*to, both[0])] = (first * cos - second * sin).astype(target.dtype)
            target[(*to, both[1])] = (second * cos + first * sin).astype(target.dtype)
        for rest in attention.channels(head_dim - 2 * half):
            part = pl.ds(2 * half + rest.start, rest.size)
            target[(*to, part)] = scaled(source[(*index, part)], multiplier)

    if layout.frequencies:

        def rotate_queries(i, _):
            row, _ = tb.rows(first_row + i * BLOCK_MOVED, BLOCK_MOVED, num_queries * per_group)
            query = lax.div(row, per_group)
            moved(query, inputs["query"], outputs["query"], (query, lax.rem(row, per_group)))

        lax.fori_loop(0, blocks.rows // BLOCK_MOVED, rotate_queries, None)

    def record(i, _):
        query, _ = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_queries)
        node, multiplier = num_grown + query, layout.key_multiplier
        key, value = inputs["node key"], inputs["node value"]
        if layout.frequencies:
            moved(query, key, outputs["node key"], (query,), to=(node,), multiplier=multiplier)
        else:
            parts = [scaled(part, multiplier) for part in attention.load(key, query)]
            attention.store(outputs["node key"], (node,), parts)
        attention.store(outputs["node value"], (node,), attention.load(value, query))

    def record_grown(i, _):
        node, _ = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_grown)
        for name in ("node key", "node value"):
            grown = inputs[name.replace("node", "grown")]
            attention.store(outputs[name], (node,), attention.load(grown, node))

    @pl.when(is_last)
    def _():
        lax.fori_loop(0, pl.cdiv(num_queries, BLOCK_MOVED), record, None)
        if num_grown:
            lax.fori_loop(0, pl.cdiv(num_grown, BLOCK_MOVED), record_grown, None)

    # What the threads of this program wrote above all of them read below.
    tb.barrier(interpret)

    row = tb.rows(first_row, blocks.rows, num_queries * per_group)[0]
    query, head = lax.div(row, per_group), lax.rem(row, per_group)
    rotated = outputs["query"] if layout.frequencies else inputs["query"]
    attend = functools.partial(attention.attend, attention.load(rotated, query, head), layout.scale)
    carry = attention.nothing_seen(blocks.rows, head_dim)
    carry = attention.attend_cache(
        attend,
        carry,
        (inputs["key"], inputs["value"], jnp.minimum(old_length, capacity)),
        block=min(blocks.keys, tb.padded_size(capacity)),
        share=(split, blocks.splits),
    )
    if "path" in inputs:
        old_key, old_value, path = inputs["old key"], inputs["old value"], inputs["path"]
        num_old = path.shape[0]

        def from_path(i, carry):
            step, exists = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_old)
            node, seen = path[step], (exists & (step < count))[None, :]
            return attend(
                carry, attention.load(old_key, node), attention.load(old_value, node), seen
            )

        num_blocks = lax.div(count + BLOCK_MOVED - 1, BLOCK_MOVED)
        carry = lax.fori_loop(0, num_blocks * is_last.astype(jnp.int32), from_path, carry)
    sums, *rest = attention.attend_nodes(
        attend,
        carry,
        (outputs["node key"], outputs["node value"], inputs["mask"], query),
        last=attention.last_query((first_row, blocks.rows), per_group, num_queries),
        block=min(blocks.keys, tb.padded_size(num_nodes)),
        share=(split, blocks.splits),
    )
    # More tokens than places: some are dropped, and no output would be right.
    sums = [jnp.where(length > capacity, jnp.nan, value) for value in sums]
    attention.write(outputs, (query, head), (sums, *rest))

    if "path" in inputs:
        outputs["length"][...] = length
        num_written = jnp.clip(capacity - old_length, 0, count)

        def write(i, _):
            step, _ = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_written)
            for name, old in (("key", old_key), ("value", old_value)):
                attention.store(
                    outputs[name], (old_length + step,), attention.load(old, path[step])
                )

        @pl.when(is_last & (pl.program_id(0) == 0))
        def _():
            lax.fori_loop(0, lax.div(num_written + BLOCK_MOVED - 1, BLOCK_MOVED), write, None)
