"""`tree_attention_layer` as one Pallas-Triton kernel that updates the cache in place.

One order: positions are cut into blocks, and block i belongs to split `i % splits`. The sizes
depend on the model's shapes alone. So the position of a key decides when it is added, and a query's
output depends, to the bit, on nothing but the tokens that it sees.

Passes: there are two kinds of programs, for each batch row and key head. They write parts of the
softmax, which a reduction puts together; see `online_softmax.SoftmaxParts`.

- A program of a split adds its *whole* blocks, which were in the cache before, to a block of rows:
  queries times the query heads that share a key head.
- The blocks behind are the *tail*. There each query has keys of its own, since two nodes of one
  depth have one position. A program has one query and one block. It gathers the keys from the
  cache, from the accepted path in the previous tree's pending record, and from the nodes above.

Each program norms and rotates its queries, and those of the tail the keys they need, into the
pending record; both go through memory (mostly the L1 cache). At the end one program for each batch
row and key head appends the path to the cache. No program waits for another: several may write the
same numbers to one place, and none reads what only another one writes.

Numerics: see `online_softmax`. Angles, cosines and sines are float32. Rotated queries and keys
are rounded to the dtype of the inputs, as they are in the pending record.

Refuses what `tree_attention` refuses, and caches of capacity 0. Any number of nodes and of rotated
pairs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels import walk
from pallas_kernels.numerics import PartialSums, scaled
from pallas_kernels.tree_attention import online_softmax, pallas_triton
from pallas_kernels.tree_attention.config import NUM_STAGES, BlockSizes, layer_block_sizes
from pallas_kernels.tree_attention.kv_cache import KVCache, NodeKV
from pallas_kernels.tree_attention.layout import AttentionLayout, HeadNorms
from pallas_kernels.tree_attention.online_softmax import channels, load, store
from pallas_kernels.triton import Ref

_CHANNELS_MOVED = 32  # at a time, of parts of a product, which take registers
BLOCK_MOVED = 16  # rows that are rotated or copied at a time; few, for cosines take registers


def unsupported(layout: AttentionLayout, capacity: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if not capacity:
        return "the cache has capacity 0"
    return pallas_triton.unsupported(layout.head_dim)


@functools.partial(jax.jit, static_argnames=("layout", "in_parts", "interpret", "blocks"))
def tree_attention_layer(
    projected: jax.Array | PartialSums,
    cache: KVCache,
    depth: jax.Array,
    mask: jax.Array,
    *,
    layout: AttentionLayout,
    norms: HeadNorms | None,
    prefix_pending: NodeKV | None,
    previous: tuple[NodeKV, jax.Array] | None,
    in_parts: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[Any, NodeKV, KVCache]:
    """See `api.tree_attention_layer`; `blocks` None: those of `config`."""
    batch, num_queries, num_columns = projected.shape
    num_nodes, capacity = mask.shape[2], cache.keys.shape[2]
    num_heads, num_groups, head_dim = layout.num_heads, layout.num_groups, layout.head_dim
    per_group = num_heads // num_groups
    num_rows = num_queries * per_group
    blocks = blocks or layer_block_sizes(
        projected.dtype, num_rows=num_rows, num_groups=num_groups, head_dim=head_dim
    )
    ancestors = walk.steps(mask.reshape(-1, num_nodes)).reshape(batch, num_queries, -1)
    # Positions of a tail: from the start of a block, the path, and a way down the tree.
    num_old = 0 if previous is None else previous[1].shape[1]
    tails = pl.cdiv(blocks.keys - 1 + num_old + num_nodes, blocks.keys)
    parts = blocks.splits + tails

    # Columns as heads. Columns around them that are not whole heads are dropped, which is a copy.
    first_column = layout.first_column
    is_copied = num_columns % head_dim or first_column % (per_group * head_dim)

    def in_heads(array: jax.Array) -> jax.Array:
        if is_copied:
            array = array[..., first_column : first_column + layout.num_columns]
        return array.reshape(*array.shape[:-1], -1, head_dim)

    if isinstance(projected, PartialSums):
        heads: Any = dataclasses.replace(projected, parts=in_heads(projected.parts))
    else:
        heads = in_heads(projected)
    first_head = 0 if is_copied else first_column // head_dim

    def of_heads(count: int | None, first: int) -> tuple[Any, pl.BlockSpec]:
        """Heads of a program's key head, so many or one, from a first head of all on."""
        block = (None, num_queries, count, head_dim)
        place = first // (count or 1)
        if isinstance(heads, PartialSums):
            parts = len(heads.parts)
            return heads, pl.BlockSpec((parts, *block), lambda i, u, b: (0, b, 0, place + u, 0))
        return heads, pl.BlockSpec(block, lambda i, u, b: (b, 0, place + u, 0))

    def of_row(array: Any) -> tuple[Any, pl.BlockSpec]:
        return tb.blocked(array, "b..."[: array.ndim], "iub")

    def of_group(length: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, length, None, head_dim), lambda i, u, b: (b, 0, u, 0))

    def of_nodes(kind: str, nodes: NodeKV) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
        names = f"{kind} key", f"{kind} value"
        return {name: (x, of_group(x.shape[1])) for name, x in zip(names, nodes, strict=True)}

    of_queries = online_softmax.query_block(num_queries, per_group, head_dim)

    inputs = {
        "query": of_heads(per_group, first_head),
        "node key": of_heads(None, first_head + num_heads),
        "node value": of_heads(None, first_head + num_heads + num_groups),
        "key": tb.blocked(cache.keys, "bu..", "iub"),
        "value": tb.blocked(cache.values, "bu..", "iub"),
        "length": of_row(cache.length),
        "depth": of_row(depth),
        "ancestors": of_row(ancestors),
    }
    if layout.frequencies:
        frequencies = jnp.asarray(layout.frequencies, jnp.float32)
        inputs["frequencies"] = tb.blocked(frequencies, ".", "iub")
    if norms is not None:
        inputs["query norm"] = tb.blocked(norms.query_weight, ".", "iub")
        inputs["node key norm"] = tb.blocked(norms.key_weight, ".", "iub")
    if prefix_pending is not None:
        inputs |= of_nodes("prefix", prefix_pending)
    if previous is not None:
        old, path = previous
        inputs |= {**of_nodes("old", old), "path": of_row(walk.steps(path))}

    pending = jax.ShapeDtypeStruct((batch, num_nodes, num_groups, head_dim), projected.dtype)
    shape = (batch, num_queries, num_heads, head_dim)
    results = online_softmax.outputs(shape, projected.dtype, per_group=per_group, parts=parts)
    outputs = {
        "node key": (pending, of_group(num_nodes)),
        "node value": (pending, of_group(num_nodes)),
        **results,
    }
    if layout.frequencies or norms is not None:
        # Normed and rotated queries: each program reads back what it wrote.
        outputs["query"] = (jax.ShapeDtypeStruct(shape, projected.dtype), of_queries)
    if previous is not None:
        outputs |= {name: inputs[name] for name in ("key", "value")}
        outputs["length"] = of_row(jax.typeof(cache.length))  # others read the old
    of_tail = num_queries * pl.cdiv(per_group, tb.SMALLEST_BLOCK) * tails
    got = tb.call_by_name(
        functools.partial(
            _kernel,
            layout=layout,
            epsilon=0.0 if norms is None else norms.epsilon,
            blocks=blocks,
            tails=tails,
            interpret=interpret,
        ),
        inputs,
        outputs,
        name="tree_attention_layer",
        num_warps=blocks.num_warps,
        num_stages=NUM_STAGES,
        interpret=interpret,
        in_one_order=True,
        grid=(of_tail + pl.cdiv(num_rows, blocks.rows) * blocks.splits, num_groups, batch),
    )
    if previous is not None:
        cache = KVCache(got["key"], got["value"], got["length"])
    tail = {name: inputs[name][0] for name in ("length", "path", "ancestors") if name in inputs}
    y: Any = online_softmax.SoftmaxParts(
        {name: got[name] for name in results} | tail,
        projected.dtype,
        splits=blocks.splits,
        block=blocks.keys,
        capacity=capacity,
        interpret=interpret,
    )
    y = y if in_parts else y.total().reshape(shape)
    return y, NodeKV(got["node key"], got["node value"]), cache


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    layout: AttentionLayout,
    epsilon: float,
    blocks: BlockSizes,
    tails: int,
    interpret: bool,
) -> None:
    """A program of one key head and one batch row; those of the tail are the first.

    Inputs:
        "query" [Q, W/U, E]; "node key", "node value" [Q, E]; "key", "value" [L, E]; "length" [];
        "depth" [Q]; "ancestors" [Q, N + 2], see `walk.steps`; "frequencies" [R], if any;
        "query norm", "node key norm" [E], if any;
        "prefix key", "prefix value" [N - Q, E], if any;
        "old key", "old value" [O, E], "path" [O + 2], if there is a previous tree.

    Outputs:
        "node key", "node value" [N, E]; "query" [Q, W/U, E], if normed or rotated; those of
        `online_softmax.outputs`; "key", "value" [L, E], "length" [], if there is a previous tree.
    """
    num_queries, per_group, head_dim = inputs["query"].shape
    num_nodes = outputs["node key"].shape[0]
    num_prefix = num_nodes - num_queries  # queries are the last nodes
    capacity = inputs["key"].shape[0]
    old_length = inputs["length"][...]
    count = inputs["path"][0] if "path" in inputs else 0
    length = old_length + count
    whole = lax.div(old_length, blocks.keys)
    head_blocks = pl.cdiv(per_group, tb.SMALLEST_BLOCK)
    of_tail = num_queries * head_blocks * tails
    program = pl.program_id(0)
    is_tail = program < of_tail
    # A split and the first of its rows, unless it is a program of the tail.
    number = jnp.maximum(program - of_tail, 0)
    split = lax.rem(number, blocks.splits)
    first_row = lax.div(number, blocks.splits) * blocks.rows
    is_split = ~is_tail & (split < whole)
    # A query, the first of its heads, and a block of its tail, or 0.
    of_query, tail = lax.div(program, tails), lax.rem(program, tails)
    query = jnp.minimum(lax.div(of_query, head_blocks), num_queries - 1)
    first_head = lax.rem(of_query, head_blocks) * tb.SMALLEST_BLOCK
    first = (whole + tail) * blocks.keys
    end = length + inputs["ancestors"][query, 0]
    is_tail &= (tail == 0) | (first < end)

    def ancestor(place: jax.Array) -> jax.Array:
        return inputs["ancestors"][query, 1 + jnp.clip(place, 0, num_nodes - 1)]

    # 1. Rotated queries of this program, then the keys and values of the tree that it reads: the
    # nodes above in this block, and the query itself at least once.
    above = jnp.maximum(first, length) - length
    below = jnp.maximum(jnp.minimum(first + blocks.keys, end) - length, above)
    for_queries = is_tail.astype(jnp.int32) + is_split.astype(jnp.int32) * (
        blocks.rows // BLOCK_MOVED
    )
    for_nodes = is_tail.astype(jnp.int32) * (lax.div(below - above, BLOCK_MOVED) + 1)
    rotated = outputs.get("query", inputs["query"])
    half = len(layout.frequencies)
    fused = functools.partial(tb.multiply_add, interpret=interpret)

    def write_rows(i: jax.Array, _carry: Any) -> None:
        row, _ = tb.rows(first_row + i * BLOCK_MOVED, BLOCK_MOVED, num_queries * per_group)
        head, _ = tb.rows(first_head, BLOCK_MOVED, per_group)
        head = jnp.where(is_tail, head, lax.rem(row, per_group))
        of_row = jnp.where(is_tail, query, lax.div(row, per_group))
        place, _ = tb.rows(above + (i - for_queries) * BLOCK_MOVED, BLOCK_MOVED, below + 1)
        node = ancestor(place) - num_prefix
        node = jnp.where((place < below) & (node >= 0), node, query)
        is_query = i < for_queries
        angles = []  # pairs of channels, cosines, sines
        if layout.frequencies:
            position = length + inputs["depth"][jnp.where(is_query, of_row, node)]
            position = position.astype(jnp.float32)[:, None]
            for pairs in tb.parts(half, _CHANNELS_MOVED):
                angle = fused(position, inputs["frequencies"][pairs][None, :])
                angles.append((pairs, jnp.cos(angle), jnp.sin(angle)))

        def turn(name: str, source: tuple, target: tuple, multiplier: float) -> None:
            """Norms and multiplies rows of heads, rotates them and writes them."""
            ref, kind = outputs[name], outputs[name].dtype
            weight: Ref = inputs.get(f"{name} norm")
            scale = None
            if weight is not None:
                parts = [part.astype(jnp.float32) for part in load(inputs[name], *source)]
                squares = [jnp.sum(part * part, axis=1) for part in parts]
                scale = lax.rsqrt(functools.reduce(jnp.add, squares) / head_dim + epsilon)

            def read(start: Any, size: Any) -> tuple[tuple, jax.Array]:
                part = pl.ds(start, size)
                value = inputs[name][(*source, part)]
                if scale is not None:
                    normed = value.astype(jnp.float32) * scale[:, None]
                    value = (normed * weight[part].astype(jnp.float32)[None, :]).astype(kind)
                return (*target, part), scaled(value, multiplier)

            for pairs, cos, sin in angles:
                (left, first), (right, second) = (
                    read(start + pairs.start, pairs.size) for start in (0, half)
                )
                first, second = first.astype(jnp.float32), second.astype(jnp.float32)
                ref[left] = fused(second, -sin, fused(first, cos)).astype(kind)
                ref[right] = fused(first, sin, fused(second, cos)).astype(kind)
            for behind in channels(head_dim - 2 * half):
                place, value = read(2 * half + behind.start, behind.size)
                ref[place] = value

        if "query" in outputs:
            at = of_row, head
            pl.when(is_query)(lambda: turn("query", at, at, 1.0))

        @pl.when(~is_query)
        def write_node() -> None:
            target = (num_prefix + node,)
            turn("node key", (node,), target, layout.key_multiplier)
            for part in tb.parts(head_dim, _CHANNELS_MOVED):
                value = inputs["node value"][node, part]
                outputs["node value"][(*target, part)] = value

    lax.fori_loop(0, for_queries + for_nodes, write_rows, None)

    attend = functools.partial(online_softmax.attend, scale=layout.scale, interpret=interpret)

    # All threads read below what single threads wrote above.
    tb.barrier(interpret)

    # 2. Whole blocks of the cache.
    @pl.when(is_split)
    def _() -> None:
        row, _ = tb.rows(first_row, blocks.rows, num_queries * per_group)
        at = lax.div(row, per_group), lax.rem(row, per_group)
        softmax = online_softmax.attend_cache(
            functools.partial(attend, load(rotated, *at)),
            online_softmax.empty(blocks.rows, head_dim),
            *(inputs["key"], inputs["value"], jnp.minimum(whole * blocks.keys, capacity)),
            block=blocks.keys,
            split=split,
            splits=blocks.splits,
        )
        online_softmax.write(outputs, split, at, softmax)

    # 3. A block of the tail of one query.
    @pl.when(is_tail)
    def _() -> None:
        head, _ = tb.rows(first_head, tb.SMALLEST_BLOCK, per_group)
        at = jnp.full_like(head, query), head
        position = first + lax.broadcasted_iota(jnp.int32, (blocks.keys,), 0)
        node = ancestor(position - length)
        in_tree = (position >= length) & (position < end)
        sources = [
            ("", jnp.minimum(position, capacity - 1), position < jnp.minimum(old_length, capacity)),
            ("node ", node, in_tree & (node >= num_prefix)),
        ]
        if num_prefix:
            sources.append(
                ("prefix ", jnp.minimum(node, num_prefix - 1), in_tree & (node < num_prefix))
            )
        if "path" in inputs:
            step = position - old_length
            node = inputs["path"][1 + jnp.clip(step, 0, inputs["path"].shape[0] - 2)]
            sources.append(("old ", node, (step >= 0) & (step < count)))

        def gathered(name: str) -> list[jax.Array]:
            parts = []
            for some in channels(head_dim):
                block = jnp.zeros((blocks.keys, some.size), inputs["key"].dtype)
                for kind, index, exists in sources:
                    ref = (outputs if kind == "node " else inputs)[kind + name]
                    there = exists[:, None]
                    loaded = tb.masked_load(ref, (index, some), there, interpret=interpret)
                    block = jnp.where(there, loaded, block)
                parts.append(block)
            return parts

        seen = (position < end)[None, :]
        queries = load(rotated, *at)
        softmax = attend(queries, None, gathered("key"), gathered("value"), seen)
        online_softmax.write(outputs, blocks.splits + tail, at, softmax)

    # 4. The prefix goes to the pending record, and the accepted path to the end of the cache.
    def move(count: int | jax.Array, source: str, target: str, places: Callable) -> None:
        """Copies keys and values; `places` says from where and to where."""

        def step(i: jax.Array, _: Any) -> None:
            place, to = places(tb.rows(i * BLOCK_MOVED, BLOCK_MOVED, count)[0])
            for name in ("key", "value"):
                store(outputs[target + name], (to,), load(inputs[source + name], place))

        lax.fori_loop(0, lax.div(count + BLOCK_MOVED - 1, BLOCK_MOVED), step, None)

    @pl.when(program == of_tail + blocks.splits - 1)
    def _() -> None:
        if num_prefix:
            move(num_prefix, "prefix ", "node ", lambda node: (node, node))
        if "path" in inputs:
            outputs["length"][...] = length
            written = jnp.clip(capacity - old_length, 0, count)
            path = inputs["path"]
            move(written, "old ", "", lambda step: (path[1 + step], old_length + step))
