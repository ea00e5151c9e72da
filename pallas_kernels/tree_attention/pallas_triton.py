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
from pallas_kernels.tree_attention.config import ANY_BATCH, BlockSizes, block_sizes
from pallas_kernels.tree_attention.online_softmax import Split
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

    of_queries = online_softmax.query_block(num_queries, per_group, head_dim)
    of_nodes = pl.BlockSpec((None, num_nodes, None, head_dim), lambda i, u, b: (b, 0, u, 0))
    in_cache = pl.BlockSpec((None, None, capacity, head_dim), lambda i, u, b: (b, u, 0, 0))
    cache = [keys, values] if capacity else []
    results = online_softmax.outputs(query.shape, query.dtype, per_group=per_group, parts=splits)
    parts = tb.call(
        functools.partial(
            _kernel,
            scale=scale,
            splits=splits,
            block_rows=block_rows,
            interpret=interpret,
            # A tree may be much smaller than the cache.
            block_cache=min(blocks.keys, tb.padded_size(capacity)) if capacity else 0,
            block_nodes=min(blocks.keys, tb.padded_size(num_nodes)),
        ),
        name="tree_attention",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(pl.cdiv(num_rows, block_rows) * splits, num_groups, batch),
        in_specs=[
            of_queries,
            of_nodes,
            of_nodes,
            pl.BlockSpec((None,), lambda i, u, b: (b,)),
            pl.BlockSpec((None, num_queries, num_nodes), lambda i, u, b: (b, 0, 0)),
            *(in_cache for _ in cache),
        ],
        out_specs={name: spec for name, (_, spec) in results.items()},
        out_shape={name: shape for name, (shape, _) in results.items()},
    )(query, node_keys, node_values, length, mask, *cache)
    return online_softmax.combined(parts, query.dtype, splits=splits, interpret=interpret)


def _kernel(
    query_ref: Ref,  # [Q, W/U, E]
    node_keys_ref: Ref,  # [N, E]
    node_values_ref: Ref,  # [N, E]
    length_ref: Ref,  # []
    mask_ref: Ref,  # [Q, N]
    *refs: Ref,  # keys and values of the cache [L, E], if there is one; outputs
    scale: float,
    splits: int,
    block_rows: int,
    block_cache: int,
    block_nodes: int,
    interpret: bool,
) -> None:
    *cache_refs, output_refs = refs
    num_queries, per_group, head_dim = query_ref.shape
    program = pl.program_id(0)
    split = Split(lax.rem(program, splits), splits)

    # Row r of the product is query r // (W/U) with head r % (W/U).
    first_row = lax.div(program, splits) * block_rows
    row, _ = tb.rows(first_row, block_rows, num_queries * per_group)
    query, head = lax.div(row, per_group), lax.rem(row, per_group)
    loaded = online_softmax.load(query_ref, query, head)
    attend = functools.partial(online_softmax.attend, loaded, scale=scale, interpret=interpret)
    softmax = online_softmax.empty(block_rows, head_dim)
    if block_cache:
        length = jnp.minimum(length_ref[...], cache_refs[0].shape[0])
        softmax = online_softmax.attend_cache(
            attend, softmax, (cache_refs[0], cache_refs[1], length), block=block_cache, split=split
        )
    softmax = online_softmax.attend_nodes(
        attend,
        softmax,
        (node_keys_ref, node_values_ref, mask_ref),
        query,
        last=online_softmax.last_query(first_row, block_rows, per_group, num_queries),
        block=block_nodes,
        split=split,
    )
    online_softmax.write(output_refs, split.number, (query, head), softmax)
