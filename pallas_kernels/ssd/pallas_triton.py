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


@functools.partial(jax.jit, static_argnames="interpret")
def ssd(*arrays: Array, interpret: bool = False) -> tuple[Array, Array]:
    """See `api.ssd`: from x to the state."""
    x, _, _, B, *_ = arrays
    blocks = DEFAULTS[tb.dtype_case(x.dtype)]
    batch, length, num_heads, head_dim = x.shape
    num_groups, state_size = B.shape[2:]
    channels = channels_of(blocks.state, head_dim, state_size)
    part = HeadBlocks(channels, state_size, num_heads // num_groups)
    specs = {
        "x": part.of_channels(length),
        "dt": part.of_head(length),
        "A": part.one_of_heads,
        "B": part.of_group(length),
        "C": part.of_group(length),
        "D": part.skip,
        "state": part.state,
    }
    inputs = dict(zip(specs, zip(arrays, specs.values(), strict=True), strict=True))
    results = tb.call_by_name(
        functools.partial(
            _kernel,
            block_positions=min(blocks.positions, tb.padded_size(length)),
            block_state=min(blocks.part, state_size),
        ),
        inputs,
        {"y": inputs["x"], "state": inputs["state"]},
        name="ssd",
        num_warps=8,
        interpret=interpret,
        grid=(batch, num_heads, head_dim // channels),
    )
    return results["y"], results["state"]


def _kernel(
    inputs: dict[str, Ref], outputs: dict[str, Ref], *, block_positions: int, block_state: int
) -> None:
    """Refs by name: x [T, p], dt [T], A [], B and C [T, S], D [p], state [p, S].

    outputs: y [T, p], state [p, S].
    """
    x_ref, dt_ref, B_ref, C_ref = (inputs[name] for name in ("x", "dt", "B", "C"))
    length, state_size = B_ref.shape
    parts = [pl.ds(start, block_state) for start in range(0, state_size, block_state)]
    shape = (block_positions, block_positions)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    causal = column <= row
    A, D = inputs["A"][...], inputs["D"][...]

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
        outputs["y"][here, :] = (y + D[None] * x).astype(x_ref.dtype)

        written = x * (jnp.exp(total - decay) * dt)[:, None]
        return tuple(
            jnp.exp(total) * value + tb.dot(written, B_ref[here, part], trans_a=True)
            for part, value in zip(parts, state, strict=True)
        )

    state = tuple(inputs["state"][:, part] for part in parts)
    state = lax.fori_loop(0, pl.cdiv(length, block_positions), scan_block, state)
    for part, value in zip(parts, state, strict=True):
        outputs["state"][:, part] = value
