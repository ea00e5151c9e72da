"""`replay` as a Triton kernel through jax-triton: the way out if jax drops Pallas-Triton.

The recurrence along the path, node by node, as in `recurrence.py`. The refusals of
`pallas_triton.py`; the state is updated in place. Import this only where triton is installed.
"""

from typing import Any

import jax
import triton
import triton.language as tl
from jax_triton import triton_call

from pallas_kernels import walk
from pallas_kernels.head_blocks import channels_of

_STATE = 32 * 128  # numbers of the state that a program owns


@triton.jit
def replay_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    state_ptr,
    steps_ptr,
    new_state_ptr,  # `state_ptr` again
    NODES: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The new state of one row, one head and one block of its channels."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, channels = tl.num_programs(1), CHANNELS * tl.num_programs(2)
    group = head // (heads // GROUPS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, STATE)
    A = tl.load(A_ptr + head)
    offsets = ((row * heads + head) * channels + channel)[:, None] * STATE + column[None, :]
    state = tl.load(state_ptr + offsets)
    steps_ptr += row * (NODES + 2)
    for step in range(tl.load(steps_ptr)):
        node = row * NODES + tl.load(steps_ptr + 1 + step)
        dt = tl.load(dt_ptr + node * heads + head)
        x = tl.load(x_ptr + (node * heads + head) * channels + channel).to(tl.float32)
        B = tl.load(B_ptr + (node * GROUPS + group) * STATE + column).to(tl.float32)
        state = tl.exp(dt * A) * state + (dt * x)[:, None] * B[None, :]
    tl.store(new_state_ptr + offsets, state)


def replay(*arrays: jax.Array, **options: Any) -> jax.Array:
    """See `api.replay`, whose arrays these are. Options go to `jax_triton.triton_call`."""
    x, dt, A, B, state, path = arrays
    batch, num_heads, head_dim, state_size = state.shape
    channels = channels_of(_STATE, head_dim, state_size)
    return triton_call(
        *(x, dt, A, B, state, walk.steps(path)),
        kernel=replay_kernel,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        grid=(batch, num_heads, head_dim // channels),
        name="replay",
        input_output_aliases={4: 0},
        NODES=x.shape[1],
        GROUPS=B.shape[2],
        STATE=state_size,
        CHANNELS=channels,
        **options,
    )
