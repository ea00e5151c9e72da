"""`tree_attention_layer` as one Pallas-Triton kernel that updates the cache in place.

Passes: the programs of `tree_attention`, with a prologue and an epilogue. First each program
rotates its queries, and the last split rotates the tree's keys into the pending record; both go
through memory (mostly the L1 cache), from where the softmax reads them as in `tree_attention`. The
accepted path of the previous tree is read where it is, in that tree's pending record. At the end
one program for each batch row and key head appends the path to the cache. No program waits for
another: loads of the last block of the cache include positions beyond the old length, which another
program may be writing, but those are masked out. They must be finite, before and after, because
they are multiplied by zero.

Numerics: see `online_softmax`. Angles, cosines and sines are float32. Rotated queries and keys
are rounded to the dtype of the inputs, as they are in the pending record.

Refuses what `tree_attention` refuses, and caches of capacity 0. Any number of nodes and of rotated
pairs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import triton as tb
from pallas_kernels.numerics import scaled
from pallas_kernels.tree_attention import online_softmax, pallas_triton
from pallas_kernels.tree_attention.config import BlockSizes, block_sizes
from pallas_kernels.tree_attention.kv_cache import KVCache, NodeKV
from pallas_kernels.tree_attention.layout import AttentionLayout
from pallas_kernels.tree_attention.online_softmax import Softmax, Split
from pallas_kernels.triton import Ref

BLOCK_MOVED = 16  # rows that are rotated or copied at a time; few, for cosines take registers


def unsupported(layout: AttentionLayout, capacity: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if not capacity:
        return "the cache has capacity 0"
    return pallas_triton.unsupported(layout.head_dim)


@functools.partial(jax.jit, static_argnames=("layout", "interpret", "blocks"))
def tree_attention_layer(
    projected: Float[Array, "B Q X"],
    cache: KVCache,
    depth: Int[Array, "B Q"],
    mask: Bool[Array, "B Q N"],
    *,
    layout: AttentionLayout,
    prefix_pending: NodeKV | None,
    previous: tuple[NodeKV, Bool[Array, "B O"]] | None,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[Float[Array, "B Q W E"], NodeKV, KVCache]:
    """See `api.tree_attention_layer`; `blocks` None: those of `config`."""
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

    # Columns as heads. Further columns that are not whole heads are dropped, which is a copy.
    if num_columns % head_dim:
        projected = projected[..., : layout.num_columns]
    heads = projected.reshape(batch, num_queries, -1, head_dim)

    def of_row(array: jax.Array) -> pl.BlockSpec:
        shape = array.shape[1:]
        return pl.BlockSpec((None, *shape), lambda i, k, u, b: (b,) + (0,) * len(shape))

    def of_group(length: int, first: int = 0) -> pl.BlockSpec:
        return pl.BlockSpec((None, length, None, head_dim), lambda i, k, u, b: (b, 0, first + u, 0))

    of_queries = online_softmax.query_block(num_queries, per_group, head_dim)
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
        of_all = pl.BlockSpec(frequencies.shape, lambda i, k, u, b: (0,))
        inputs["frequencies"] = (frequencies, of_all)
    if prefix_pending is not None:
        prefix_keys, prefix_values = prefix_pending
        of_prefix = of_group(prefix_keys.shape[1])
        inputs |= {
            "prefix key": (prefix_keys, of_prefix),
            "prefix value": (prefix_values, of_prefix),
        }
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

    pending = jax.ShapeDtypeStruct((batch, num_nodes, num_groups, head_dim), projected.dtype)
    shape = (batch, num_queries, num_heads, head_dim)
    results = online_softmax.outputs(
        shape, projected.dtype, per_group=per_group, splits=blocks.splits
    )
    outputs: online_softmax.Outputs = {
        "node key": (pending, of_group(num_nodes)),
        "node value": (pending, of_group(num_nodes)),
        **results,
    }
    if layout.frequencies:
        # Rotated queries: each program reads back what it wrote.
        outputs["query"] = (jax.ShapeDtypeStruct(shape, projected.dtype), of_queries)
    if previous is not None:
        outputs |= {name: inputs[name] for name in ("key", "value", "length")}
    got = tb.call_by_name(
        functools.partial(_kernel, layout=layout, blocks=blocks, interpret=interpret),
        inputs,
        outputs,
        in_place={name: name for name in ("key", "value") if previous is not None},
        name="tree_attention_layer",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(pl.cdiv(num_rows, blocks.rows), blocks.splits, num_groups, batch),
    )
    if previous is not None:
        cache = KVCache(got["key"], got["value"], got["length"])
    parts = {name: got[name] for name in results}
    y = online_softmax.combined(parts, projected.dtype, interpret=interpret)
    return y, NodeKV(got["node key"], got["node value"]), cache


def in_order(path: Bool[Array, "B O"]) -> tuple[Int[Array, "B O"], Int[Array, " B"]]:
    """The nodes of each path in order, then zeros; and their number. XLA computes it once."""
    node = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    place = jnp.cumsum(path, axis=1, dtype=jnp.int32) - 1
    is_there = (place[:, None] == node[..., None]) & path[:, None]  # [B, place, node]
    return jnp.where(is_there, node[:, None], 0).sum(axis=2, dtype=jnp.int32), path.sum(
        axis=1, dtype=jnp.int32
    )


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    layout: AttentionLayout,
    blocks: BlockSizes,
    interpret: bool,
) -> None:
    """A program of one block of rows, one split, one key head and one batch row.

    Inputs:
        "query" [Q, W/U, E]; "node key", "node value" [Q, E]; "key", "value" [L, E]; "length" [];
        "depth" [Q]; "mask" [Q, N]; "frequencies" [R], if any;
        "prefix key", "prefix value" [N - Q, E], if any;
        "old key", "old value" [O, E], "path" [O], "count" [], if there is a previous tree.

    Outputs:
        "node key", "node value" [N, E]; "query" [Q, W/U, E], if rotated; those of
        `online_softmax.outputs`; "key", "value" [L, E], "length" [], if there is a previous tree.
    """
    num_queries, per_group, head_dim = inputs["query"].shape
    num_nodes = inputs["mask"].shape[1]
    num_prefix = num_nodes - num_queries  # queries are the last nodes
    capacity = inputs["key"].shape[0]
    first_row = pl.program_id(0) * blocks.rows
    split = Split(pl.program_id(1), blocks.splits)
    is_last = split.number == split.splits - 1
    old_length = inputs["length"][...]
    count = inputs["count"][...] if "count" in inputs else 0
    length = old_length + count

    # 1. Rotated queries of this program; keys and values of the tree in the last split.
    if layout.frequencies:

        def rotate_queries(i: jax.Array, _: Any) -> None:
            row, _ = tb.rows(first_row + i * BLOCK_MOVED, BLOCK_MOVED, num_queries * per_group)
            query, head = lax.div(row, per_group), lax.rem(row, per_group)
            position = length + inputs["depth"][query]
            source, target = inputs["query"], outputs["query"]
            rotate(
                *(source, (query, head), target, (query, head)),
                position=position,
                frequencies_ref=inputs["frequencies"],
            )

        lax.fori_loop(0, blocks.rows // BLOCK_MOVED, rotate_queries, None)

    def write_queries(i: jax.Array, _: Any) -> None:
        query, _ = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_queries)
        node, multiplier = num_prefix + query, layout.key_multiplier
        key, value = inputs["node key"], inputs["node value"]
        if layout.frequencies:
            rotate(
                *(key, (query,), outputs["node key"], (node,)),
                position=length + inputs["depth"][query],
                frequencies_ref=inputs["frequencies"],
                multiplier=multiplier,
            )
        else:
            parts = [scaled(part, multiplier) for part in online_softmax.load(key, query)]
            online_softmax.store(outputs["node key"], (node,), parts)
        online_softmax.store(outputs["node value"], (node,), online_softmax.load(value, query))

    def write_prefix(i: jax.Array, _: Any) -> None:
        node, _ = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_prefix)
        for name in ("key", "value"):
            prefix = online_softmax.load(inputs[f"prefix {name}"], node)
            online_softmax.store(outputs[f"node {name}"], (node,), prefix)

    @pl.when(is_last)
    def _() -> None:
        lax.fori_loop(0, pl.cdiv(num_queries, BLOCK_MOVED), write_queries, None)
        if num_prefix:
            lax.fori_loop(0, pl.cdiv(num_prefix, BLOCK_MOVED), write_prefix, None)

    # All threads read below what single threads wrote above.
    tb.barrier(interpret)

    # 2. Attention to the cache, to the accepted path and to the tree.
    row = tb.rows(first_row, blocks.rows, num_queries * per_group)[0]
    query, head = lax.div(row, per_group), lax.rem(row, per_group)
    rotated = outputs["query"] if layout.frequencies else inputs["query"]
    loaded = online_softmax.load(rotated, query, head)
    attend = functools.partial(online_softmax.attend, loaded, layout.scale)
    softmax = online_softmax.attend_cache(
        attend,
        online_softmax.empty(blocks.rows, head_dim),
        (inputs["key"], inputs["value"], jnp.minimum(old_length, capacity)),
        block=min(blocks.keys, tb.padded_size(capacity)),
        split=split,
    )
    if "path" in inputs:
        old_key, old_value, path = inputs["old key"], inputs["old value"], inputs["path"]
        num_old = path.shape[0]

        def attend_path(i: jax.Array, softmax: Softmax) -> Softmax:
            step, exists = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_old)
            node, seen = path[step], (exists & (step < count))[None, :]
            keys, values = online_softmax.load(old_key, node), online_softmax.load(old_value, node)
            return attend(softmax, keys, values, seen)

        num_blocks = lax.div(count + BLOCK_MOVED - 1, BLOCK_MOVED)
        softmax = lax.fori_loop(0, num_blocks * is_last.astype(jnp.int32), attend_path, softmax)
    softmax = online_softmax.attend_nodes(
        attend,
        softmax,
        (outputs["node key"], outputs["node value"], inputs["mask"]),
        query,
        last=online_softmax.last_query(first_row, blocks.rows, per_group, num_queries),
        block=min(blocks.keys, tb.padded_size(num_nodes)),
        split=split,
    )
    # The cache is overfull: tokens are dropped, so no output is right.
    sums = [jnp.where(length > capacity, jnp.nan, value) for value in softmax.sums]
    online_softmax.write(outputs, (query, head), softmax._replace(sums=sums))

    # 3. The accepted path goes to the end of the cache.
    if "path" in inputs:
        outputs["length"][...] = length
        num_written = jnp.clip(capacity - old_length, 0, count)

        def append(i: jax.Array, _: Any) -> None:
            step, _ = tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, num_written)
            for name in ("key", "value"):
                moved = online_softmax.load(inputs[f"old {name}"], path[step])
                online_softmax.store(outputs[name], (old_length + step,), moved)

        @pl.when(is_last & (pl.program_id(0) == 0))
        def _() -> None:
            lax.fori_loop(0, lax.div(num_written + BLOCK_MOVED - 1, BLOCK_MOVED), append, None)


def rotate(
    source_ref: Ref,  # [..., E]
    source: tuple,
    target_ref: Ref,  # [..., E]
    target: tuple,
    *,
    position: jax.Array,
    frequencies_ref: Ref,  # [R]
    multiplier: float = 1.0,
) -> None:
    """Multiplies rows of heads, rotates them to their positions and writes them."""
    head_dim, half = source_ref.shape[-1], frequencies_ref.shape[0]
    position = position.astype(jnp.float32)
    for pairs in online_softmax.channels(half):
        angle = position[:, None] * frequencies_ref[pairs][None, :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        both = [pl.ds(start + pairs.start, pairs.size) for start in (0, half)]
        first, second = (
            scaled(source_ref[(*source, part)], multiplier).astype(jnp.float32) for part in both
        )
        kind = target_ref.dtype
        target_ref[(*target, both[0])] = (first * cos - second * sin).astype(kind)
        target_ref[(*target, both[1])] = (second * cos + first * sin).astype(kind)
    for rest in online_softmax.channels(head_dim - 2 * half):
        part = pl.ds(2 * half + rest.start, rest.size)
        target_ref[(*target, part)] = scaled(source_ref[(*source, part)], multiplier)
