"""`replay` as one Pallas-Triton kernel that updates the state in place.

Passes: a program handles one row, one head and one block of its channels. It reads its part of the
state once and writes it once (input and output are one buffer), and reads the nodes block by block
from the last to the first, so that registers do not grow with the tree.

Numerics: float32; products as `triton.dot` says. The decay from a node to the end of the
path is summed as such, never as a difference of sums.

Refuses head and state sizes that are not powers of two. Any number of nodes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.head_blocks import HeadBlocks, channels_of
from pallas_kernels.replay.config import BlockSizes, block_sizes


def unsupported(head_dim: int, state_size: int) -> str | None:
    """Why these shapes cannot run, or None."""
    return tb.unsupported_size("head_dim", head_dim) or tb.unsupported_size(
        "state_size", state_size
    )


def replay(x, dt, A, B, state, path, *, interpret=False, blocks: BlockSizes | None = None):
    """See `api.replay`."""
    blocks = blocks or block_sizes(x.dtype)
    batch, num_nodes, num_heads, head_dim = x.shape
    num_groups, state_size = B.shape[2:]
    channels = channels_of(blocks.state, head_dim, state_size)
    part = HeadBlocks(channels, state_size, num_heads // num_groups)
    return tb.call(
        functools.partial(_kernel, block_nodes=min(blocks.nodes, tb.padded_size(num_nodes))),
        name="replay",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, head_dim // channels),
        in_specs=[
            part.of_channels(num_nodes),
            part.of_head(num_nodes),
            part.one_of_heads,
            part.of_group(num_nodes),
            part.state,
            pl.BlockSpec((None, num_nodes), lambda b, h, p: (b, 0)),
        ],
        out_specs=part.state,
        out_shape=jax.ShapeDtypeStruct(state.shape, state.dtype),
        input_output_aliases={4: 0},
    )(x, dt, A, B, state, path)


def _kernel(x_ref, dt_ref, A_ref, B_ref, state_ref, path_ref, new_state_ref, *, block_nodes: int):
    nodes = (x_ref, dt_ref, A_ref[...], B_ref, path_ref)
    (written,), decay = along_path(*nodes, block_nodes=block_nodes, block_state=B_ref.shape[1])
    new_state_ref[...] = decay * state_ref[...] + written


def along_path(
    x_ref,  # [N, p]
    dt_ref,  # [N]
    A,  # []
    B_ref,  # [N, S]
    path_ref,  # [N]
    *,
    block_nodes: int,
    block_state: int,
):
    """What the nodes of a path write, and the factor by which the state before decays.

    What is written comes as parts `[p, s]`, because Triton cannot slice `[p, S]`.
    """
    (num_nodes, channels), state_size = x_ref.shape, B_ref.shape[1]
    num_blocks = pl.cdiv(num_nodes, block_nodes)
    node = lax.broadcasted_iota(jnp.int32, (block_nodes, block_nodes), 0)
    other = lax.broadcasted_iota(jnp.int32, (block_nodes, block_nodes), 1)

    def from_block(i, carry):
        written, after_block = carry
        here, exists = tb.rows((num_blocks - 1 - i) * block_nodes, block_nodes, num_nodes)
        dt = jnp.where(path_ref[here] & exists, dt_ref[here], 0.0)
        log_decay = dt * A
        after = after_block + jnp.sum(jnp.where(other > node, log_decay[None, :], 0.0), axis=1)
        weight = jnp.exp(after) * dt  # zero off the path
        weighted = x_ref[here, :].astype(jnp.float32) * weight[:, None]
        written = tuple(
            total + tb.dot(weighted, B_ref[here, pl.ds(k * block_state, block_state)], trans_a=True)
            for k, total in enumerate(written)
        )
        return written, after_block + jnp.sum(log_decay)

    nothing = (jnp.zeros((channels, block_state), jnp.float32),) * (state_size // block_state)
    written, total = lax.fori_loop(0, num_blocks, from_block, (nothing, jnp.float32(0.0)))
    return written, jnp.exp(total)
