"""`replay` as a Triton kernel through jax-triton: the way out if jax drops Pallas-Triton.

In closed form, block by block from the last node to the first: the decay to the end of the path is
summed directly, never as a difference of sums. The refusals of `pallas_triton.py`; the state is
updated in place. Import this only where triton is installed.
"""

from typing import Any

import jax
import triton
import triton.language as tl

from pallas_kernels import triton as tb
from pallas_kernels.tree_scan import jax_triton_versions

# By whether inputs are float32, whose full products need many registers.
_BLOCKS = {
    False: dict(BLOCK_NODES=32, num_warps=4, num_stages=1),
    True: dict(BLOCK_NODES=16, num_warps=8, num_stages=1),
}
_STATE = 32 * 128  # numbers of the state that a program owns


@triton.jit
def dot(left, right, total):
    """`total + left @ right` in float32 accuracy, of a float32 `left`; see `triton.dot`."""
    if right.dtype == tl.float32:  # unsplit; "ieee" has no effect on bf16
        total = tl.dot(left, right, total, input_precision="ieee")
    else:
        high = left.to(tl.bfloat16)
        low = (left - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, right, tl.dot(low, right, total))
    return total


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
    channels = min(head_dim, max(tb.SMALLEST_BLOCK, _STATE // state_size))
    blocks = dict(_BLOCKS[x.dtype == "float32"])
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
