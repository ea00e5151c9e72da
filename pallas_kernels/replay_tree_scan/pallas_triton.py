"""`replay_tree_scan` as one Pallas-Triton kernel that updates the state in place.

Passes: a program handles one row, one head and one block of its channels. It reads its part of the
state once, adds the previous path to it, writes it once (input and output are one buffer), and
keeps it in registers for all blocks of query nodes of the new tree. So unlike `tree_scan` the
queries are a loop, not an axis of the grid; what is parallel instead is the channels. The scores
C_i . B_j do not depend on the channel, and each block of channels computes them again: arithmetic
for bandwidth, of which decoding has less.

Numerics: those of `replay` and `tree_scan`, whose code this is; the queries see the new state in
float32, as it is before any rounding.

Refuses head and state sizes that are not powers of two, and states of more than `MOST_STATE`. Any
numbers of nodes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import triton as tb
from pallas_kernels import tuning
from pallas_kernels.head_blocks import HeadBlocks, channels_of
from pallas_kernels.replay.pallas_triton import along_path
from pallas_kernels.replay.pallas_triton import unsupported as unsupported_state
from pallas_kernels.replay_tree_scan.config import BlockSizes, block_sizes
from pallas_kernels.tree_scan.pallas_triton import outputs

# Of float32 inputs, with more all block sizes that were tried spill registers on an H100; of others
# nothing was tried.
MOST_STATE = {"float32": 128, "bfloat16": 256}


def unsupported(head_dim: int, state_size: int, dtype: DTypeLike) -> str | None:
    """Why these shapes cannot run, or None."""
    case = tuning.dtype_case(dtype)
    if state_size > MOST_STATE[case]:
        return f"state_size = {state_size} of {case} inputs is more than {MOST_STATE[case]}"
    return unsupported_state(head_dim, state_size)


def replay_tree_scan(
    prev_x,
    prev_dt,
    prev_B,
    prev_path,
    x,
    dt,
    A,
    B,
    C,
    D,
    state,
    ancestor_mask,
    *,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.replay_tree_scan`."""
    blocks = blocks or block_sizes(x.dtype)
    batch, num_nodes, num_heads, head_dim = x.shape
    num_replayed = prev_x.shape[1]
    num_queries, num_groups, state_size = C.shape[1:]
    channels = channels_of(blocks.state, head_dim, state_size)
    part = HeadBlocks(channels, state_size, num_heads // num_groups)
    return tb.call(
        functools.partial(
            _kernel,
            block_replayed=min(blocks.replayed, tb.padded_size(num_replayed)),
            block_queries=min(blocks.queries, tb.padded_size(num_queries)),
            block_keys=min(blocks.keys, tb.padded_size(num_nodes)),
            block_state=min(blocks.part, state_size),
        ),
        name="replay_tree_scan",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, head_dim // channels),
        in_specs=[
            part.of_channels(num_replayed),
            part.of_head(num_replayed),
            part.of_group(num_replayed),
            pl.BlockSpec((None, num_replayed), lambda b, h, p: (b, 0)),
            part.of_channels(num_nodes),
            part.of_head(num_nodes),
            part.one_of_heads,
            part.of_group(num_nodes),
            part.of_group(num_queries),
            part.skip,
            part.state,
            pl.BlockSpec((None, num_nodes, num_nodes), lambda b, h, p: (b, 0, 0)),
        ],
        out_specs=(part.of_channels(num_queries), part.state),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        input_output_aliases={10: 1},
    )(prev_x, prev_dt, prev_B, prev_path, x, dt, A, B, C, D, state, ancestor_mask)


def _kernel(
    prev_x_ref,
    prev_dt_ref,
    prev_B_ref,
    prev_path_ref,
    x_ref,
    dt_ref,
    A_ref,
    B_ref,
    C_ref,
    D_ref,
    state_ref,
    mask_ref,
    y_ref,
    new_state_ref,
    *,
    block_replayed: int,
    block_queries: int,
    block_keys: int,
    block_state: int,
):
    state_size = C_ref.shape[1]
    parts = [pl.ds(k * block_state, block_state) for k in range(state_size // block_state)]

    A = A_ref[...]
    previous = (prev_x_ref, prev_dt_ref, A, prev_B_ref, prev_path_ref)
    written, decay = along_path(*previous, block_nodes=block_replayed, block_state=block_state)
    state = [
        decay * state_ref[:, part] + new for part, new in zip(parts, written, strict=True)
    ]  # [p, s] each
    for part, value in zip(parts, state, strict=True):
        new_state_ref[:, part] = value

    tree = (x_ref, dt_ref, A, B_ref, C_ref, D_ref[...], mask_ref)

    def write(query, y):
        y_ref[query, :] = y.astype(y_ref.dtype)

    outputs_of_tree(state, tree, write, block_queries=block_queries, block_keys=block_keys)


def outputs_of_tree(state, tree, write, *, block_queries: int, block_keys: int):
    """The outputs at all queries of a tree, one block of them at a time.

    Args:
        state: before the root, as parts `[p, s]`.
        tree: x, dt, A, B, C, D and mask, as `tree_scan`'s `outputs` takes them.
        write: what is called with the queries `[q]` and their outputs `[q, p]`, float32.
        block_queries, block_keys: nodes of a block.
    """
    C_ref = tree[4]
    num_queries, block_state = C_ref.shape[0], state[0].shape[1]

    def block_of_queries(i, _):
        query, _ = tb.rows(i * block_queries, block_queries, num_queries)
        carried = functools.reduce(
            jnp.add,
            [
                tb.dot(C_ref[query, pl.ds(k * block_state, block_state)], value, trans_b=True)
                for k, value in enumerate(state)
            ],
        )
        y = outputs(carried, i, *tree, block_keys=block_keys, block_state=block_state)
        write(query, y)

    lax.fori_loop(0, pl.cdiv(num_queries, block_queries), block_of_queries, None)
