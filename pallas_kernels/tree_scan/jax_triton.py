"""`tree_scan` as a Triton kernel through jax-triton: the algorithm of `pallas_triton.py`.

Where that clamps indices this masks loads and stores. Same numerics, same refusals.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels import jax_triton_backend
from pallas_kernels import triton as tb
from pallas_kernels.tree_scan.config import BlockSizes, block_sizes
from pallas_kernels.triton_functions import dot


@triton.jit
def tree_scan_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    state_ptr,
    mask_ptr,
    y_ptr,
    NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_STATE: tl.constexpr,
):
    """Outputs of one block of queries of one row and one head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    first_query: tl.constexpr = NODES - QUERIES  # queries are the last nodes

    query = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    query_exists = query < QUERIES
    node = tl.arange(0, PADDED_NODES)
    channel = tl.arange(0, CHANNELS)
    part = tl.arange(0, BLOCK_STATE)

    x_ptr += row * NODES * HEADS * CHANNELS + head * CHANNELS
    y_ptr += row * QUERIES * HEADS * CHANNELS + head * CHANNELS
    dt_ptr += row * NODES * HEADS + head
    B_ptr += (row * NODES * GROUPS + group) * STATE
    C_ptr += (row * QUERIES * GROUPS + group) * STATE
    state_ptr += (row * HEADS + head) * CHANNELS * STATE
    mask_ptr += row * NODES * NODES

    A = tl.load(A_ptr + head)
    log_decay = tl.load(dt_ptr + node * HEADS, mask=node < NODES, other=0.0) * A
    query_rows = mask_ptr + (first_query + query)[:, None] * NODES
    path = tl.load(
        query_rows + node[None, :], mask=query_exists[:, None] & (node < NODES)[None, :], other=0
    )
    query_decay = tl.sum(tl.where(path != 0, log_decay[None, :], 0.0), axis=1)

    # The state before the root, decayed to each query.
    y = tl.zeros((BLOCK_QUERIES, CHANNELS), dtype=tl.float32)
    for start in range(0, STATE, BLOCK_STATE):
        C = tl.load(
            C_ptr + query[:, None] * (GROUPS * STATE) + (start + part)[None, :],
            mask=query_exists[:, None],
            other=0.0,
        )
        state = tl.load(state_ptr + channel[:, None] * STATE + (start + part)[None, :])
        y = dot(C, tl.trans(state), y)
    y = y * tl.exp(query_decay)[:, None]

    # The nodes above each query; ancestors come before their descendants.
    for first_key in range(0, first_query + (block + 1) * BLOCK_QUERIES, BLOCK_KEYS):
        key = first_key + tl.arange(0, BLOCK_KEYS)
        key_exists = key < NODES
        key_path = tl.load(
            mask_ptr + key[:, None] * NODES + node[None, :],
            mask=key_exists[:, None] & (node < NODES)[None, :],
            other=0,
        )
        key_decay = tl.sum(tl.where(key_path != 0, log_decay[None, :], 0.0), axis=1)
        scores = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), dtype=tl.float32)
        for start in range(0, STATE, BLOCK_STATE):
            C = tl.load(
                C_ptr + query[:, None] * (GROUPS * STATE) + (start + part)[None, :],
                mask=query_exists[:, None],
                other=0.0,
            )
            B = tl.load(
                B_ptr + key[:, None] * (GROUPS * STATE) + (start + part)[None, :],
                mask=key_exists[:, None],
                other=0.0,
            )
            scores = dot(C, tl.trans(B), scores)
        above = tl.load(
            query_rows + key[None, :], mask=query_exists[:, None] & key_exists[None, :], other=0
        )
        exponent = tl.where(above != 0, query_decay[:, None] - key_decay[None, :], -float("inf"))
        dt = tl.load(dt_ptr + key * HEADS, mask=key_exists, other=0.0)
        weight = scores * tl.exp(exponent) * dt[None, :]
        x = tl.load(
            x_ptr + key[:, None] * (HEADS * CHANNELS) + channel[None, :],
            mask=key_exists[:, None],
            other=0.0,
        )
        y = dot(weight, x, y)

    D = tl.load(D_ptr + head * CHANNELS + channel)
    offsets = query[:, None] * (HEADS * CHANNELS) + channel[None, :]
    query_x = tl.load(
        x_ptr + first_query * (HEADS * CHANNELS) + offsets, mask=query_exists[:, None], other=0.0
    )
    y += D[None, :] * query_x.to(tl.float32)
    tl.store(y_ptr + offsets, y.to(query_x.dtype), mask=query_exists[:, None])


def tree_scan(x, dt, A, B, C, D, state, mask, *, blocks: BlockSizes | None = None, **kwargs):
    """See `api.tree_scan`. Further arguments go to `jax_triton.triton_call`."""
    blocks = blocks or block_sizes(x.dtype)
    batch, num_nodes, num_heads, head_dim = x.shape
    num_queries, num_groups, state_size = C.shape[1:]
    block_queries = min(blocks.queries, tb.padded_size(num_queries))
    return jax_triton_backend.call(
        *(x, dt, A, B, C, D, state, mask),
        kernel=tree_scan_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype),
        grid=(batch, num_heads, triton.cdiv(num_queries, block_queries)),
        name="tree_scan",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        NODES=num_nodes,
        PADDED_NODES=tb.padded_size(num_nodes),
        QUERIES=num_queries,
        HEADS=num_heads,
        GROUPS=num_groups,
        CHANNELS=head_dim,
        STATE=state_size,
        BLOCK_QUERIES=block_queries,
        BLOCK_KEYS=min(blocks.keys, tb.padded_size(num_nodes)),
        BLOCK_STATE=min(blocks.state, state_size),
        **kwargs,
    )
