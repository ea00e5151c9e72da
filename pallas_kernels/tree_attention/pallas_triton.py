"""`tree_attention` as one Pallas-Triton kernel over a long cache, and a reduction of its splits.

Passes: a program handles one batch row, one key head, one block of queries and one split of the
cache. The query heads that share a key head are rows of one product, so a block of rows reads keys
and values once, as stored. Splits are interleaved: with `splits = 3` the first program reads blocks
0, 3, 6, ..., so all are equally long whatever the row's length, and nothing beyond that length is
read. The last split, never the longest, also takes the tree's nodes. With more than one split the
parts of the softmax are written in float32 and read by the reduction. A key of the cache and a node
at the same position are added at different times: see `pallas_triton_layer` for one order.

Numerics: see `online_softmax`; rounded once, at the end.

Refuses heads `E` that are not a multiple of 16 or have more than 256 channels; heads that are not a
power of two, such as Zamba2's 160 or 224, are processed in parts. Any number of queries and nodes;
any capacity of the cache, 0 included. Derivatives are XLA's; see `api.tree_attention`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.tree_attention import online_softmax
from pallas_kernels.tree_attention.config import ANY_BATCH, NUM_STAGES, BlockSizes, block_sizes
from pallas_kernels.triton import Ref

LARGEST_HEAD = 256


def unsupported(head_dim: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if head_dim > LARGEST_HEAD:
        return f"head_dim = {head_dim} is more than {LARGEST_HEAD}"
    return tb.unsupported_in_parts("head_dim", head_dim)


@functools.partial(jax.jit, static_argnames=("scale", "to_the_bit", "interpret", "blocks"))
def tree_attention(
    *arrays: jax.Array,
    scale: float,
    to_the_bit: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See `api.tree_attention`, whose arrays these are; `blocks` None: those of `config`.

    `to_the_bit`: a row has the same outputs alone and in a batch, whatever the capacity and however
    many nodes come after its own.
    """
    query, node_keys, node_values, keys, values, length, mask = arrays
    batch, num_queries, num_heads, head_dim = query.shape
    num_nodes, num_groups = node_keys.shape[1:3]
    capacity = keys.shape[2]
    per_group = num_heads // num_groups
    num_rows = num_queries * per_group
    sizes = ANY_BATCH
    if not to_the_bit:
        sizes = dict(num_rows=num_rows, num_groups=batch * num_groups, capacity=capacity)
    blocks = blocks or block_sizes(query.dtype, **sizes, head_dim=head_dim)
    block_rows = min(blocks.rows, tb.padded_size(num_rows))
    splits = blocks.splits if capacity else 1

    arrays_by_name = {
        "query": (query, online_softmax.query_block(num_queries, per_group, head_dim)),
        "node key": tb.blocked(node_keys, "b.u.", "iub"),
        "node value": tb.blocked(node_values, "b.u.", "iub"),
        "length": tb.blocked(length, "b", "iub"),
        "mask": tb.blocked(mask, "b..", "iub"),
    }
    if capacity:
        for name, array in (("key", keys), ("value", values)):
            arrays_by_name[name] = tb.blocked(array, "bu..", "iub")
    parts = tb.call_by_name(
        functools.partial(
            _kernel,
            scale=scale,
            splits=splits,
            block_rows=block_rows,
            # A tree may be much smaller than the cache.
            block_cache=min(blocks.keys, tb.padded_size(capacity)) if capacity else 0,
            block_nodes=min(blocks.keys, tb.padded_size(num_nodes)),
            interpret=interpret,
        ),
        arrays_by_name,
        online_softmax.outputs(query.shape, query.dtype, per_group=per_group, parts=splits),
        name="tree_attention",
        num_warps=blocks.num_warps,
        num_stages=NUM_STAGES,
        interpret=interpret,
        grid=(pl.cdiv(num_rows, block_rows) * splits, num_groups, batch),
    )
    if "y" in parts:
        return parts["y"]
    whole = online_softmax.SoftmaxParts(parts, query.dtype, splits, interpret=interpret)
    return whole.total().reshape(query.shape)


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    scale: float,
    splits: int,
    block_rows: int,
    block_cache: int,
    block_nodes: int,
    interpret: bool,
) -> None:
    """A program of one batch row and key head.

    Inputs: "query" [Q, W/U, E]; "node key", "node value" [N, E]; "length" []; "mask" [Q, N]; "key",
    "value" [L, E], if there is a cache. Outputs: those of `online_softmax.outputs`.
    """
    num_queries, per_group, head_dim = inputs["query"].shape
    num_nodes = inputs["mask"].shape[1]
    program = pl.program_id(0)
    split = lax.rem(program, splits)

    # Row r of the product is query r // (W/U) with head r % (W/U).
    first_row = lax.div(program, splits) * block_rows
    row, _ = tb.rows(first_row, block_rows, num_queries * per_group)
    query, head = lax.div(row, per_group), lax.rem(row, per_group)
    attend = functools.partial(
        online_softmax.attend,
        online_softmax.load(inputs["query"], query, head),
        scale=scale,
        interpret=interpret,
    )
    softmax = online_softmax.empty(block_rows, head_dim)
    if block_cache:
        cache = inputs["key"], inputs["value"]
        length = jnp.minimum(inputs["length"][...], cache[0].shape[0])
        softmax = online_softmax.attend_cache(
            *(attend, softmax, *cache, length), block=block_cache, split=split, splits=splits
        )

    def add_nodes(j: jax.Array, softmax: online_softmax.Softmax) -> online_softmax.Softmax:
        node, exists = tb.rows(j * block_nodes, block_nodes, num_nodes)
        seen = inputs["mask"][query[:, None], node[None, :]] & exists[None, :]
        keys, values = (online_softmax.load(inputs[f"node {x}"], node) for x in ("key", "value"))
        return attend(softmax, keys, values, seen)

    # Nodes after the last query of the block are masked for all of its rows.
    last = jnp.minimum(lax.div(first_row + block_rows - 1, per_group), num_queries - 1)
    num_blocks = lax.div(num_nodes - num_queries + last + block_nodes, block_nodes)
    if splits > 1:
        num_blocks = num_blocks * (split == splits - 1).astype(jnp.int32)
    softmax = lax.fori_loop(0, num_blocks, add_nodes, softmax)
    online_softmax.write(outputs, split, (query, head), softmax)
