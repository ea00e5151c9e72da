"""`rms_norm`, `add_rms_norm` and `gated_rms_norm`, each one Pallas-Triton kernel.

Passes: a program handles one row, of `gated_rms_norm` one group of a row. It reads both inputs
once, holds their sum or product in registers, and writes each result once. XLA takes two kernels
for the few rows of a tree, and reads the sum again in the second. From a deferred norm
`add_rms_norm` also reads the row's parts of the mean square.

Numerics: float32 from load to store, rounded once. `add_rms_norm` rounds the sum to the type of
the stream, and norms the rounded sum in float32. A program's code depends on the size of its row
or group alone, so each has one order of sums.

Triton's blocks are powers of two, and rows of 5120 or 2688 are not: a group is read as a few
blocks, the largest first. Refuses groups (rows) whose size is not a multiple of `SMALLESTBLOCK` or
above `MOST_NUMBERS`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import native
from pallas_kernels import triton as tb
from pallas_kernels.numerics import DeferredRMSNorm, PartialSums, Product, scaled
from pallas_kernels.rms_norm.xla import ACTIVATIONS
from pallas_kernels.triton import Ref

BLOCK = 4096  # the most numbers that are loaded at once
MOST_NUMBERS = 1 << 14  # 64 registers of each of 256 threads


def unsupported(name: str, size: int) -> str | None:
    """Why groups of this size cannot run, or None; `name` is for the message."""
    if size > MOST_NUMBERS:
        return f"{name} = {size} is more than {MOST_NUMBERS}"
    return tb.unsupported_in_parts(name, size)


def warps(size: int) -> int:
    """Of a program, which holds a group (`add_rms_norm`: a row) in registers.

    With these nothing spills on sm_80 to sm_90 (`benchmarks/results/spills.json`).
    """
    return 4 if size <= 4096 else 8


@functools.partial(jax.jit, static_argnames=("epsilon", "multiplier", "interpret"))
def add_rms_norm(
    residual: Array,
    output: Any,
    weight: Array,
    *,
    epsilon: float,
    multiplier: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `api.add_rms_norm`."""
    inputs, outputs, output_epsilon = arrays_of_sum(residual, output, weight, "r")
    results = tb.call_by_name(
        functools.partial(
            _add_kernel, epsilon=epsilon, multiplier=multiplier, output_epsilon=output_epsilon
        ),
        inputs,
        outputs,
        name="add_rms_norm",
        num_warps=warps(residual.shape[-1]),
        interpret=interpret,
        in_one_order=True,
        grid=inputs["residual"][0].shape[:1],
    )
    return results["sum"].reshape(residual.shape), results["normed"].reshape(residual.shape)


def arrays_of_sum(
    residual: Array, output: Any, weight: Array, grid: str
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Inputs and outputs of `added_and_normed`, for a grid with or without rows "r".

    And the epsilon of a deferred norm, or 0.
    """
    inputs = {"residual": in_rows(residual, grid), "norm_weight": tb.blocked(weight, ".", grid)}
    epsilon = 0.0
    if isinstance(output, DeferredRMSNorm):
        inputs["mean_squares"] = in_rows(output.mean_squares, grid)
        epsilon, output = output.epsilon, output.value
    inputs["output"] = in_rows(output, grid)
    rows, block = inputs["residual"]
    normed = jax.ShapeDtypeStruct(rows.shape, output.dtype)
    return inputs, {"sum": (rows, block), "normed": (normed, block)}, epsilon


def in_rows(array: Product, grid: str) -> tuple[Any, pl.BlockSpec]:
    """All rows of an array, of which a program sees one."""
    if isinstance(array, PartialSums):
        parts = array.parts.reshape(len(array.parts), -1, array.shape[-1])
        return tb.blocked(dataclasses.replace(array, parts=parts), "r.", grid)
    return tb.blocked(native.rows_of(array), "r.", grid)


def _add_kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    epsilon: float,
    multiplier: float,
    output_epsilon: float,
) -> None:
    """Refs by name: see `added_and_normed`; outputs: sum and normed [M]."""
    options = dict(epsilon=epsilon, multiplier=multiplier, output_epsilon=output_epsilon)
    for part, total, normed in added_and_normed(inputs, (), **options):
        outputs["sum"][part] = total
        outputs["normed"][part] = normed.astype(outputs["normed"].dtype)


def added_and_normed(
    inputs: dict[str, Ref],
    row: tuple[int, ...],
    *,
    epsilon: float,
    multiplier: float,
    output_epsilon: float,
) -> list[tuple[pl.Slice, Array, Array]]:
    """The parts of a row, with their sums and norms in the type of the residual.

    Refs by name: residual and output [M], mean_squares [J] of a deferred norm, or these of several
    rows; norm_weight [M].
    """
    dtype = inputs["residual"].dtype
    parts = tb.parts(inputs["residual"].shape[-1], BLOCK)
    added = [inputs["output"][*row, part] for part in parts]
    if "mean_squares" in inputs:
        count = inputs["mean_squares"].shape[-1]
        place, exists = tb.rows(0, tb.padded_size(count), count)
        total = jnp.sum(jnp.where(exists, inputs["mean_squares"][*row, place], 0.0))
        output_scale = lax.rsqrt(total + output_epsilon)
        added = [value.astype(jnp.float32) * output_scale for value in added]
    added = [scaled(value, multiplier).astype(jnp.float32) for value in added]
    sums = [
        (inputs["residual"][*row, part].astype(jnp.float32) + value).astype(dtype)
        for part, value in zip(parts, added, strict=True)
    ]
    wide = [value.astype(jnp.float32) for value in sums]
    weights = [inputs["norm_weight"][part] for part in parts]
    normed = _normed(wide, weights, inputs["norm_weight"].shape[0], epsilon)
    return [
        (part, total, value.astype(dtype))
        for part, total, value in zip(parts, sums, normed, strict=True)
    ]


def _normed(values: list[Array], weights: list[Array], size: int, epsilon: float) -> list[Array]:
    """The norm of the parts of a row or group of this size, float32."""
    squares = functools.reduce(jnp.add, [jnp.sum(value * value) for value in values])
    scale = lax.rsqrt(squares / size + epsilon)
    return [
        value * scale * weight.astype(jnp.float32)
        for value, weight in zip(values, weights, strict=True)
    ]


def rms_norm(x: Product, weight: Array, **options: Any) -> Array:
    """See `api.rms_norm`."""
    return gated_rms_norm(x, None, weight, norm="gate_then_norm", num_groups=1, **options)


@functools.partial(
    jax.jit,
    static_argnames=("norm", "epsilon", "num_groups", "gate_start", "activation", "interpret"),
)
def gated_rms_norm(
    y: Product,
    gate: Product | None,
    weight: Array | None,
    *,
    norm: str,
    epsilon: float,
    num_groups: int,
    gate_start: int = 0,
    activation: str = "silu",
    interpret: bool = False,
) -> Array:
    """See `api.gated_rms_norm`; without a gate, a norm alone."""
    group_size = y.shape[-1] // num_groups
    rows, _ = in_rows(y, "rg")
    group = pl.BlockSpec((None, group_size), lambda row, g: (row, g))
    inputs = {"y": (rows, group)}
    if isinstance(rows, PartialSums):
        of_parts = (len(rows.parts), None, group_size)
        inputs["y"] = rows, pl.BlockSpec(of_parts, lambda row, g: (0, row, g))
    if gate is not None:
        inputs["gate"] = in_rows(gate, "rg")
    if weight is not None:
        is_shared = weight.size == group_size
        inputs["weight"] = (
            weight,
            pl.BlockSpec((group_size,), lambda row, g: (g * (not is_shared),)),
        )
    results = tb.call_by_name(
        functools.partial(
            _gated_kernel,
            norm=norm,
            epsilon=epsilon,
            gate_start=gate_start,
            activation=activation,
        ),
        inputs,
        {"output": (jax.ShapeDtypeStruct(rows.shape, rows.dtype), group)},
        name="rms_norm" if gate is None else "gated_rms_norm",
        num_warps=warps(group_size),
        interpret=interpret,
        in_one_order=True,
        grid=(rows.shape[0], num_groups),
    )
    return results["output"].reshape(y.shape)


def _gated_kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    gate_start: int,
    **options: Any,
) -> None:
    """Refs by name: see `gated_and_normed`, y of a group alone; outputs: output [group size]."""
    size = inputs["y"].shape[0]
    first_gate = gate_start + pl.program_id(1) * size
    parts = tb.parts(size, BLOCK)
    values = [inputs["y"][part] for part in parts]
    for part, value in zip(
        parts, gated_and_normed(inputs, values, parts, (), first_gate, 0, **options), strict=True
    ):
        outputs["output"][part] = value.astype(outputs["output"].dtype)


def gated_and_normed(
    inputs: dict[str, Ref],
    values: list[Array],
    parts: list[pl.Slice],
    row: tuple[int, ...],
    first_gate: Any,
    first_weight: Any,
    *,
    norm: str,
    epsilon: float,
    activation: str,
) -> list[Array]:
    """The gated norms of the parts of a group, float32.

    Refs by name: gate [X], or of several rows, or none; weight [M] unless norm is "none".
    """

    def load(name: str, start: Any, row: tuple[int, ...] = ()) -> list[Array]:
        return [inputs[name][*row, pl.ds(start + part.start, part.size)] for part in parts]

    def gated(values: list[Array]) -> list[Array]:
        if "gate" not in inputs:
            return values
        gates = [
            ACTIVATIONS[activation](x.astype(jnp.float32)) for x in load("gate", first_gate, row)
        ]
        return [value * gate for value, gate in zip(values, gates, strict=True)]

    values = [value.astype(jnp.float32) for value in values]
    if norm != "norm_then_gate":
        values = gated(values)
    if "weight" in inputs:
        size: Any = sum(part.size for part in parts)
        values = _normed(values, load("weight", first_weight), size, epsilon)
    return gated(values) if norm == "norm_then_gate" else values
