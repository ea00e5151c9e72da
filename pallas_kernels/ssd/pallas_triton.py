"""`ssd` as one Pallas-Triton kernel that updates the state in place.

Passes: a program handles one batch row, one head and one block of its channels. It reads its part
of the state once, holds it in registers over all blocks of the sequence, and writes it in place.
Inside a block of positions the computation is quadratic, as in `xla.py`. Only outputs and the final
state are written; XLA writes decays, scores and a state per chunk, and reads them again. The price:
blocks of positions are sequential (only rows, heads and channels are parallel), and each block of
channels recomputes the scores C_i . B_j.

Numerics: float32; products as `triton.dot` says; exponents are masked before exp. Rounded once.

Refuses what `replay_tree_scan` refuses. Any length. Derivatives are XLA's; see `api.ssd`.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels import triton as tb
from pallas_kernels.tree_scan.head_blocks import HeadBlocks, channels_of
from pallas_kernels.triton import Ref


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block."""

    positions: int  # sequence positions per block
    state: int  # elements of the state per program: channels of the head times state size
    part: int  # state channels per partial product


# By dtype of the inputs. Full float32 products need many registers. With these nothing spills on
# sm_80 to sm_90 (`benchmarks/results/spills.json`).
DEFAULTS = {
    "bfloat16": BlockSizes(positions=32, state=32 * 128, part=64),
    "float32": BlockSizes(positions=16, state=16 * 128, part=32),
}


_AXES = "b.hp", "b.h", "h", "b.g.", "b.g.", "hp", "bhp."  # see `HeadBlocks.of`


@functools.partial(jax.jit, static_argnames="interpret")
def ssd(*arrays: Array, interpret: bool = False) -> tuple[Array, Array]:
    """See `api.ssd`: from x to the state."""
    x, _, _, B, _, _, state = arrays
    blocks = DEFAULTS[tb.dtype_case(x.dtype)]
    batch, length, num_heads, head_dim = x.shape
    num_groups, state_size = B.shape[2:]
    channels = channels_of(blocks.state, head_dim, state_size)
    part = HeadBlocks(channels, num_heads // num_groups)
    return tb.call(
        functools.partial(
            _kernel,
            block_positions=min(blocks.positions, tb.padded_size(length)),
            part_size=blocks.part,
        ),
        name="ssd",
        num_warps=8,
        interpret=interpret,
        grid=(batch, num_heads, head_dim // channels),
        in_specs=[part.of(x, axes)[1] for x, axes in zip(arrays, _AXES, strict=True)],
        out_specs=(part.of(x, _AXES[0])[1], part.of(state, _AXES[-1])[1]),
        out_shape=(jax.typeof(x), jax.typeof(state)),
        input_output_aliases={6: 1},
    )(*arrays)


def _kernel(
    x_ref: Ref,  # [T, p]
    dt_ref: Ref,  # [T]
    A_ref: Ref,  # []
    B_ref: Ref,  # [T, S]
    C_ref: Ref,  # [T, S]
    D_ref: Ref,  # [p]
    state_ref: Ref,  # [p, S]
    y_ref: Ref,  # [T, p]
    new_state_ref: Ref,  # [p, S]
    *,
    block_positions: int,
    part_size: int,
) -> None:
    length, state_size = B_ref.shape
    parts = tb.parts(state_size, part_size)
    shape = (block_positions, block_positions)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    causal = column <= row
    A, D = A_ref[...], D_ref[...]

    def add(values: Iterable[jax.Array]) -> jax.Array:
        return functools.reduce(jnp.add, values)

    def scan_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        here, exists = tb.rows(i * block_positions, block_positions, length)
        # With dt = 0 a position that does not exist leaves the state unchanged.
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
        y_ref[here, :] = (y + D[None] * x).astype(y_ref.dtype)

        written = x * (jnp.exp(total - decay) * dt)[:, None]
        return tuple(
            jnp.exp(total) * value + tb.dot(written, B_ref[here, part], trans_a=True)
            for part, value in zip(parts, state, strict=True)
        )

    state = tuple(state_ref[:, part] for part in parts)
    state = lax.fori_loop(0, pl.cdiv(length, block_positions), scan_block, state)
    for part, value in zip(parts, state, strict=True):
        new_state_ref[:, part] = value
