"""`gated_rms_norm` as one Pallas-Triton kernel.

Passes: a program handles one group of one row. It reads scan output and gate once, holds the gated
values in registers, and writes the result once.

Numerics: float32 from load to store, rounded once.

Triton's blocks are powers of two, and rows of 5120 or 2688 are not: a group is read as a few of
them, the largest first. Refuses groups that are no multiple of `SMALLEST_BLOCK`, or more than
`MOST_NUMBERS` numbers.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.gated_rms_norm.config import BlockSizes, block_sizes

MOST_NUMBERS = 1 << 14  # 64 registers of each of 256 threads


def unsupported(group_size: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if group_size > MOST_NUMBERS:
        return f"group size = {group_size} is more than {MOST_NUMBERS}"
    return tb.unsupported_in_parts("group size", group_size)


def gated_rms_norm(
    y,
    gate,
    weight,
    *,
    norm,
    epsilon,
    num_groups,
    gate_start=0,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.gated_rms_norm`."""
    group_size = y.shape[-1] // num_groups
    blocks = blocks or block_sizes(group_size)
    rows = (math.prod(y.shape[:-1]), y.shape[-1])
    group = pl.BlockSpec((None, group_size), lambda row, g: (row, g))
    weights = [] if weight is None else [weight]
    output = tb.call(
        functools.partial(
            _kernel,
            norm=norm,
            epsilon=epsilon,
            gate_start=gate_start,
            block=blocks.block,
        ),
        name="gated_rms_norm",
        num_warps=blocks.num_warps,
        num_stages=1,
        interpret=interpret,
        grid=(rows[0], num_groups),
        in_specs=[
            group,
            pl.BlockSpec((None, gate.shape[-1]), lambda row, g: (row, 0)),
            *(pl.BlockSpec((group_size,), lambda row, g: (g,)) for _ in weights),
        ],
        out_specs=group,
        out_shape=jax.ShapeDtypeStruct(rows, y.dtype),
    )(y.reshape(rows), gate.reshape(rows[0], -1), *weights)
    return output.reshape(y.shape)


def _kernel(y_ref, gate_ref, *refs, norm: str, epsilon: float, gate_start: int, block: int):
    weight_ref, output_ref = refs if len(refs) == 2 else (None, refs[0])  # [group size] all
    group_size = y_ref.shape[0]
    parts = tb.parts(group_size, block)

    values = [y_ref[part].astype(jnp.float32) for part in parts]
    first_gate = gate_start + pl.program_id(1) * group_size
    gates = [
        jax.nn.silu(gate_ref[pl.ds(first_gate + part.start, part.size)].astype(jnp.float32))
        for part in parts
    ]
    if norm != "norm_then_gate":
        values = [value * gate for value, gate in zip(values, gates, strict=True)]
    if weight_ref is not None:
        squares = [jnp.sum(value * value) for value in values]
        scale = lax.rsqrt(functools.reduce(jnp.add, squares) / group_size + epsilon)
        values = [
            value * scale * weight_ref[part].astype(jnp.float32)
            for value, part in zip(values, parts, strict=True)
        ]
    if norm == "norm_then_gate":
        values = [value * gate for value, gate in zip(values, gates, strict=True)]
    for part, value in zip(parts, values, strict=True):
        output_ref[part] = value.astype(output_ref.dtype)
