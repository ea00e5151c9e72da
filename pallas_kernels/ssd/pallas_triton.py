"""`ssd` as one Pallas-Triton kernel that updates the state in place.

Passes: a program handles one row, one head and one block of its channels. It reads its part of the
state once, holds it in registers while it goes through the sequence block by block, each quadratic
inside as in `xla.py`, and writes it once (input and output are one buffer). So nothing but outputs
and that state is written, where XLA writes decays, scores and a state for each chunk, and reads
them again. What it pays: blocks of positions come one after the other (only rows, heads and
channels are parallel), and each block of channels computes the scores C_i . B_j again.

Numerics: float32; products as `triton.dot` says. Masked before exp.

Refuses what `replay_tree_scan` refuses. Any length. Has no gradient of its own; see `api.ssd`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.ssd.config import BlockSizes, block_sizes
from pallas_kernels.tree_scan.head_blocks import HeadBlocks, channels_of
from pallas_kernels.tree_scan.pallas_triton import unsupported

__all__ = ["ssd", "unsupported"]


def ssd(x, dt, A, B, C, D, state, *, interpret=False, blocks: BlockSizes | None = None):
    """See `api.ssd`."""
    blocks = blocks or block_sizes(x.dtype)
    batch, length, num_heads, head_dim = x.shape
    num_groups, state_size = B.shape[2:]
    channels = channels_of(blocks.state, head_dim, state_size)
    part = HeadBlocks(channels, state_size, num_heads // num_groups)
    return tb.call(
        functools.partial(
            _kernel,
            block_positions=min(blocks.positions, tb.padded_size(length)),
            block_state=min(blocks.part, state_size),
        ),
        name="ssd",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, head_dim // channels),
        in_specs=[
            part.of_channels(length),
            part.of_head(length),
            part.one_of_heads,
            part.of_group(length),
            part.of_group(length),
            part.skip,
            part.state,
        ],
        out_specs=(part.of_channels(length), part.state),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ),
        input_output_aliases={6: 1},
    )(x, dt, A, B, C, D, state)


def _kernel(
    x_ref,  # [T, p]
    dt_ref,  # [T]
    A_ref,  # []
    B_ref,  # [T, S]
    C_ref,  # [T, S]
    D_ref,  # [p]
    state_ref,  # [p, S]
    y_ref,  # [T, p]
    new_state_ref,  # [p, S]
    *,
    block_positions: int,
    block_state: int,
):
    length, state_size = B_ref.shape
    parts = [pl.ds(start, block_state) for start in range(0, state_size, block_state)]
    shape = (block_positions, block_positions)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    causal = column <= row
    A, D = A_ref[...], D_ref[...]

    def add(values):
        return functools.reduce(jnp.add, values)

    def block(i, state):
        here, exists = tb.rows(i * block_positions, block_positions, length)
        # A position that does not exist passes the state through.
        dt = jnp.where(exists, dt_ref[here], 0.0)
        log_decay = dt * A
        decay = jnp.sum(jnp.where(causal, log_decay[None, :], 0.0), axis=1)
        total = jnp.sum(log_decay)

        x = x_ref[here, :]
        weight = jnp.exp(jnp.where(causal, decay[:, None] - decay[None, :], -jnp.inf))
        scores = add(tb.dot(C_ref[here, part], B_ref[here, part], trans_b=True) for part in parts)
        carried = add(
            tb.dot(C_ref[here, part], value, trans_b=True)
            for part, value in zip(parts, state, strict=True)
        )
        y = carried * jnp.exp(decay)[:, None] + tb.dot(scores * weight * dt[None, :], x)
        x = x.astype(jnp.float32)
        y_ref[here, :] = (y + D * x).astype(y_ref.dtype)

        written = x * (jnp.exp(total - decay) * dt)[:, None]
        return tuple(
            jnp.exp(total) * value + tb.dot(written, B_ref[here, part], trans_a=True)
            for part, value in zip(parts, state, strict=True)
        )

    state = tuple(state_ref[:, part] for part in parts)
    state = lax.fori_loop(0, pl.cdiv(length, block_positions), block, state)
    for part, value in zip(parts, state, strict=True):
        new_state_ref[:, part] = value
