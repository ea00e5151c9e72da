"""`replay` as a Triton kernel through jax-triton: the algorithm of `pallas_triton.py`.

Where that clamps indices this masks loads. Same numerics, same refusals, also in place.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels import jax_triton_backend
from pallas_kernels import triton as tb
from pallas_kernels.replay.config import BlockSizes, block_sizes
from pallas_kernels.triton_functions import dot


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


def replay(x, dt, A, B, state, path, *, blocks: BlockSizes | None = None, **kwargs):
    """See `api.replay`. Further arguments go to `jax_triton.triton_call`."""
    blocks = blocks or block_sizes(x.dtype)
    batch, num_nodes, num_heads, head_dim = x.shape
    num_groups, state_size = B.shape[2:]
    channels = min(head_dim, max(tb.SMALLEST_BLOCK, blocks.state // state_size))
    with_output = jax_triton_backend.passes_aliased_outputs()
    return jax_triton_backend.call(
        *(x, dt, A, B, state, path),
        kernel=replay_kernel_to if with_output else replay_kernel,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid=(batch, num_heads, head_dim // channels),
        name="replay",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        input_output_aliases={4: 0},
        NODES=num_nodes,
        HEADS=num_heads,
        GROUPS=num_groups,
        CHANNELS=head_dim,
        STATE=state_size,
        BLOCK_NODES=min(blocks.nodes, tb.padded_size(num_nodes)),
        BLOCK_CHANNELS=channels,
        **kwargs,
    )
