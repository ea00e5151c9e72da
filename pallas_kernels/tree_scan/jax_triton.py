"""`tree_scan` and `replay` as Triton kernels through jax-triton.

The fallback if jax drops Pallas-Triton.

The algorithm of `pallas_triton.py`, except that blocks of queries are an axis of the grid of
`tree_scan`, and that loads and stores are masked where that clamps indices. Same numerics, same
refusals; `replay` updates the state in place. Import this only where triton is installed.
"""

from typing import Any

import jax
import triton
import triton.language as tl

from pallas_kernels import triton as tb
from pallas_kernels.tree_scan import jax_triton_versions

# By whether inputs are float32: nodes in a block, channels that a partial product covers, warps and
# stages. Full float32 products need many registers.
_SCAN = {
    False: dict(BLOCK_QUERIES=32, BLOCK_KEYS=32, BLOCK_STATE=64, num_warps=4, num_stages=2),
    True: dict(BLOCK_QUERIES=16, BLOCK_KEYS=16, BLOCK_STATE=32, num_warps=4, num_stages=2),
}
_REPLAY = {
    False: dict(BLOCK_NODES=32, num_warps=4, num_stages=1),
    True: dict(BLOCK_NODES=16, num_warps=8, num_stages=1),
}
_REPLAY_STATE = 32 * 128  # numbers of the state that a program of `replay` owns


@triton.jit
def dot(left, right, total):
    """`total + left @ right` in float32 accuracy; see `triton.dot`."""
    if left.dtype == right.dtype:  # float32 unsplit; "ieee" has no effect on bf16
        total = tl.dot(left, right, total, input_precision="ieee")
    elif left.dtype == tl.bfloat16:
        high = right.to(tl.bfloat16)
        low = (right - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(left, high, tl.dot(left, low, total))
    else:
        high = left.to(tl.bfloat16)
        low = (left - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, right, tl.dot(low, right, total))
    return total


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


def tree_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    state: jax.Array,
    mask: jax.Array,
    **kwargs: Any,
) -> jax.Array:
    """See `api.tree_scan`. Further arguments go to `jax_triton.triton_call`."""
    batch, num_nodes, num_heads, head_dim = x.shape
    num_queries, num_groups, state_size = C.shape[1:]
    blocks = dict(_SCAN[x.dtype == "float32"])
    blocks["BLOCK_QUERIES"] = min(blocks["BLOCK_QUERIES"], tb.padded_size(num_queries))
    blocks["BLOCK_KEYS"] = min(blocks["BLOCK_KEYS"], tb.padded_size(num_nodes))
    blocks["BLOCK_STATE"] = min(blocks["BLOCK_STATE"], state_size)
    return jax_triton_versions.call(
        *(x, dt, A, B, C, D, state, mask),
        kernel=tree_scan_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype),
        grid=(batch, num_heads, triton.cdiv(num_queries, blocks["BLOCK_QUERIES"])),
        name="tree_scan",
        NODES=num_nodes,
        PADDED_NODES=tb.padded_size(num_nodes),
        QUERIES=num_queries,
        HEADS=num_heads,
        GROUPS=num_groups,
        CHANNELS=head_dim,
        STATE=state_size,
        **blocks,
        **kwargs,
    )


@triton.jit
def replay_kernel_to(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    state_ptr,
    path_ptr,
    new_state_ptr,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """The new state of one row, one head and one block of its channels."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    column = tl.arange(0, STATE)
    within = tl.arange(0, BLOCK_NODES)
    A = tl.load(A_ptr + head)

    written = tl.zeros((BLOCK_CHANNELS, STATE), dtype=tl.float32)
    after_block = 0.0
    num_blocks: tl.constexpr = (NODES + BLOCK_NODES - 1) // BLOCK_NODES
    for i in range(num_blocks):  # from the last to the first
        node = (num_blocks - 1 - i) * BLOCK_NODES + within
        exists = node < NODES
        on_path = tl.load(path_ptr + row * NODES + node, mask=exists, other=0) != 0
        dt = tl.load(dt_ptr + (row * NODES + node) * HEADS + head, mask=on_path, other=0.0)
        log_decay = dt * A
        later = within[None, :] > within[:, None]
        after = after_block + tl.sum(tl.where(later, log_decay[None, :], 0.0), axis=1)
        weight = tl.exp(after) * dt  # zero off the path
        x = tl.load(
            x_ptr + ((row * NODES + node)[None, :] * HEADS + head) * CHANNELS + channel[:, None],
            mask=exists[None, :],
            other=0.0,
        )
        B = tl.load(
            B_ptr + ((row * NODES + node)[:, None] * GROUPS + group) * STATE + column[None, :],
            mask=exists[:, None],
            other=0.0,
        )
        written = dot(x.to(tl.float32) * weight[None, :], B, written)
        after_block += tl.sum(log_decay)

    offsets = ((row * HEADS + head) * CHANNELS + channel)[:, None] * STATE + column[None, :]
    state = tl.load(state_ptr + offsets)
    tl.store(new_state_ptr + offsets, tl.exp(after_block) * state + written)


@triton.jit
def replay_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    state_ptr,
    path_ptr,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """`replay_kernel_to` in place."""
    replay_kernel_to(
        x_ptr,
        dt_ptr,
        A_ptr,
        B_ptr,
        state_ptr,
        path_ptr,
        state_ptr,
        NODES,
        HEADS,
        GROUPS,
        CHANNELS,
        STATE,
        BLOCK_NODES,
        BLOCK_CHANNELS,
    )


def replay(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    state: jax.Array,
    path: jax.Array,
    **kwargs: Any,
) -> jax.Array:
    """See `api.replay`. Further arguments go to `jax_triton.triton_call`."""
    batch, num_nodes, num_heads, head_dim = x.shape
    num_groups, state_size = B.shape[2:]
    channels = min(head_dim, max(tb.SMALLEST_BLOCK, _REPLAY_STATE // state_size))
    blocks = dict(_REPLAY[x.dtype == "float32"])
    blocks["BLOCK_NODES"] = min(blocks["BLOCK_NODES"], tb.padded_size(num_nodes))
    with_output = jax_triton_versions.passes_aliased_outputs()
    return jax_triton_versions.call(
        *(x, dt, A, B, state, path),
        kernel=replay_kernel_to if with_output else replay_kernel,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid=(batch, num_heads, head_dim // channels),
        name="replay",
        input_output_aliases={4: 0},
        NODES=num_nodes,
        HEADS=num_heads,
        GROUPS=num_groups,
        CHANNELS=head_dim,
        STATE=state_size,
        BLOCK_CHANNELS=channels,
        **blocks,
        **kwargs,
    )
