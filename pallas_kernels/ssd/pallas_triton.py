"""`ssd` in Pallas-Triton: one kernel, or three that run segments of a long sequence side by side.

Passes: a program handles one batch row, one head, one block of its channels and one segment. It
holds its part of the state in registers over the blocks of positions, one after the other. Inside a
block the computation is quadratic, as in `xla.py`. XLA writes decays, scores and a state per chunk,
and reads them again; here each block of channels recomputes the scores C_i . B_j.

A sequence of up to `SEGMENT` positions is one segment, whose state is updated in place. A longer
one takes three launches (section 6 of arXiv:2405.21060): the state that each segment leaves if it
starts from zeros, the states before the segments, and the outputs. Segments begin at the same
positions whatever the length is, so padding changes nothing.

Numerics: float32; products as `triton.dot` says; exponents are masked before exp. Rounded once.

Refuses what `replay_tree_scan` refuses. Any length. Derivatives are XLA's; see `api.ssd`.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels import triton as tb
from pallas_kernels.head_blocks import HeadBlocks, channels_of
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


# Positions. By arithmetic: a token of mamba2-2.7b took an H200 26 us, of which products and bytes
# are some 11, so a block of 32 positions in a layer took some 7. And its 160 programs are hardly
# more than 132 multiprocessors. No GPU has timed segments.
SEGMENT = 128


@functools.partial(jax.jit, static_argnames=("A_is_log", "interpret"))
def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array,
    state: Array,
    *,
    A_is_log: bool,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `api.ssd`."""
    blocks = DEFAULTS[tb.dtype_case(x.dtype)]
    batch, length, num_heads, head_dim = x.shape
    channels = channels_of(blocks.state, head_dim, B.shape[3])
    part = HeadBlocks(channels, num_heads // B.shape[2])
    segments = pl.cdiv(length, SEGMENT)

    def of(array: Any, axes: str) -> tuple[Any, pl.BlockSpec]:
        """A block of a row of `array`; of a row's segment, where `axes` have "s" for rows."""
        array, spec = part.of(array, axes.replace("s", "b"))
        per_row, place = 1 if "s" in axes else segments, spec.index_map
        assert place is not None

        return array, pl.BlockSpec(
            spec.block_shape, lambda row, *others: place(lax.div(row, per_row), *others)
        )

    def run(kernel: Any, name: str, rows: int, inputs: Any, outputs: Any) -> dict[str, Array]:
        return tb.call_by_name(
            functools.partial(kernel, part_size=blocks.part, segments=segments, A_is_log=A_is_log),
            inputs,
            outputs,
            name=name,
            num_warps=8,
            interpret=interpret,
            grid=(rows, num_heads, head_dim // channels),
        )

    scan = functools.partial(_scan, block_positions=min(blocks.positions, tb.padded_size(length)))
    written = {"x": of(x, "b.hp"), "dt": of(dt, "b.h"), "A": of(A, "h"), "B": of(B, "b.g.")}
    read = written | {"C": of(C, "b.g."), "D": of(D, "hp"[: D.ndim])}
    y = {"y": of(jax.typeof(x), "b.hp")}
    if segments == 1:
        in_place = {"state": of(state, "bhp.")}
        results = run(scan, "ssd", batch, read | in_place, y | in_place)
        return results["y"], results["state"]
    shape = (batch * segments, *state.shape[1:])
    of_segments = of(jax.ShapeDtypeStruct(shape, jnp.float32), "shp.")
    left = run(scan, "ssd_states", shape[0], written, {"state": of_segments})["state"]
    by_row = (batch, segments, *state.shape[1:])
    before = part.of(jax.ShapeDtypeStruct(by_row, jnp.float32), "b.hp.")
    rows = {"state": part.of(state, "bhp."), "left": part.of(left.reshape(by_row), "b.hp.")}
    rows |= {"dt": part.of(dt, "b.h"), "A": part.of(A, "h")}
    carried = run(_carry, "ssd_carry", batch, rows, {"state": rows["state"], "before": before})
    start = carried["before"].reshape(shape), of_segments[1]
    return run(scan, "ssd", shape[0], read | {"state": start}, y)["y"], carried["state"]


def _scan(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    block_positions: int,
    part_size: int,
    segments: int,
    A_is_log: bool,
) -> None:
    """Refs by name, of one row and head; p channels of it.

    inputs: x [T, p], dt [T], A [], B [T, S]; for outputs C [T, S], D [p] or [], and state [p, S],
    that before the program's segment.
    outputs: state [p, S] after the segment, or y [T, p], or both.
    """
    length, state_size = inputs["B"].shape
    parts = tb.parts(state_size, part_size)
    shape = (block_positions, block_positions)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    causal = column <= row
    A = _rate(inputs, A_is_log)
    first = lax.rem(pl.program_id(0), segments) * SEGMENT

    def add(values: Iterable[jax.Array]) -> jax.Array:
        return functools.reduce(jnp.add, values)

    def scan_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        here, exists = tb.rows(first + i * block_positions, block_positions, length)
        dt = jnp.where(exists, inputs["dt"][here], 0.0)
        log_decay = dt * A
        decay = jnp.sum(jnp.where(causal, log_decay[None, :], 0.0), axis=1)
        total = jnp.sum(log_decay)

        x = inputs["x"][here, :]
        if "y" in outputs:
            C, B = inputs["C"], inputs["B"]
            weight = jnp.exp(jnp.where(causal, decay[:, None] - decay[None, :], -jnp.inf))
            scores = add(tb.dot(C[here, part], B[here, part], trans_b=True) for part in parts)
            carried = add(
                tb.dot(C[here, part], value, trans_b=True)
                for part, value in zip(parts, state, strict=True)
            )
            y = carried * jnp.exp(decay)[:, None] + tb.dot(scores * weight * dt[None, :], x)
            skip = lax.broadcast_to_rank(inputs["D"][...], 2) * x.astype(jnp.float32)
            outputs["y"][here, :] = (y + skip).astype(outputs["y"].dtype)

        written = x.astype(jnp.float32) * (jnp.exp(total - decay) * dt)[:, None]
        return tuple(
            jnp.exp(total) * value + tb.dot(written, inputs["B"][here, part], trans_a=True)
            for part, value in zip(parts, state, strict=True)
        )

    if "state" in inputs:
        state = tuple(inputs["state"][:, part] for part in parts)
    else:
        channels = inputs["x"].shape[1]
        state = tuple(jnp.zeros((channels, part.size), jnp.float32) for part in parts)
    positions = jnp.minimum(length - first, SEGMENT)
    num_blocks = lax.div(positions + block_positions - 1, block_positions)
    state = lax.fori_loop(0, num_blocks, scan_block, state)
    if "state" in outputs:
        for part, value in zip(parts, state, strict=True):
            outputs["state"][:, part] = value


def _rate(inputs: dict[str, Ref], A_is_log: bool) -> Array:
    A = inputs["A"][...]
    return -jnp.exp(A) if A_is_log else A


def _carry(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    part_size: int,
    segments: int,
    A_is_log: bool,
) -> None:
    """Refs by name: state [p, S], left [segments, p, S], dt [T], A [].

    outputs: state [p, S] after all segments, and before [segments, p, S].
    """
    A, (length,) = _rate(inputs, A_is_log), inputs["dt"].shape
    parts = tb.parts(inputs["state"].shape[1], part_size)

    def step(segment: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        here, exists = tb.rows(segment * SEGMENT, SEGMENT, length)
        decay = jnp.exp(jnp.sum(jnp.where(exists, inputs["dt"][here], 0.0) * A))
        for part, value in zip(parts, state, strict=True):
            outputs["before"][segment, :, part] = value
        return tuple(
            decay * value + inputs["left"][segment, :, part]
            for part, value in zip(parts, state, strict=True)
        )

    state = tuple(inputs["state"][:, part] for part in parts)
    state = lax.fori_loop(0, segments, step, state)
    for part, value in zip(parts, state, strict=True):
        outputs["state"][:, part] = value
