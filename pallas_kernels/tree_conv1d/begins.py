"""The convolution at the beginning of a scan or of a delta rule: one launch for both.

A program convolves what it scans: its channels of x, and B and C of its group. So all programs of a
group convolve B and C, and write the same numbers: those of `tree_conv1d_layer`, to the bit. After
a barrier a program reads what it wrote.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.head_blocks import HeadBlocks
from pallas_kernels.numerics import scaled
from pallas_kernels.tree_conv1d import pallas_triton as conv
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Layout, time_step
from pallas_kernels.tree_conv1d.sections import Section, sections_of
from pallas_kernels.triton import Ref


def fits(convolution: Convolution, programs: int, channels: int) -> bool:
    """Whether the programs of a row, each with some channels of x, can and should do this."""
    layout, width = convolution.layout, len(convolution.conv_weight)
    batch, num_queries, _ = convolution.projected.shape
    # A tap reads two float32 parts of a product.
    taps = batch * num_queries * width * programs * (channels + 2 * layout.state_size)
    repeats = (layout.x_heads, layout.b_groups) != (layout.num_heads, layout.num_groups)
    refused = repeats or conv.unsupported_layer(layout, width)
    return not refused and 8 * taps <= tb.MOST_REPEATED_BYTES


def blocked(
    convolution: Convolution, part: HeadBlocks, *, records_x: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and outputs of `convolve`; x is recorded, and so of all nodes, or of the queries."""
    of_row, of_layer, shapes = conv.arrays_of_layer(*convolution.arrays, layout=convolution.layout)
    if not records_x:
        of_row.pop("prefix x", None)
        shapes["x"] = shapes["x"].update(shape=(*shapes["C"].shape[:2], *shapes["x"].shape[2:]))
    axes = {"x": "b.hp", "dt": "b.h", "B": "b.g.", "C": "b.g."}

    def of_program(name: str, array: Any, others: str) -> tuple[Any, pl.BlockSpec]:
        default = others[: len(array.shape)]
        return part.of(array, axes.get(name.removeprefix("prefix "), default))

    inputs = {name: of_program(name, array, "b..") for name, array in of_row.items()}
    inputs |= {
        name: of_program(name, array, "..") for name, array in of_layer.items() if array is not None
    }
    return inputs, {name: of_program(name, shape, "b..") for name, shape in shapes.items()}


def convolve(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    layout: Mamba2Layout,
    head: jax.Array,
    block: jax.Array,  # of the head's channels
    *,
    interpret: bool,
) -> None:
    """Writes x, dt, B and C of all nodes, their conv inputs, and the conv state before the root.

    Refs are those of `tree_conv1d`, but of prefix x and B, and of outputs x, dt, B and C, a program
    has its head, channels and group; x may be of the queries alone. Programs of a group, or of a
    head, write the same numbers to the same places.
    """
    num_nodes, num_queries = outputs["dt"].shape[0], inputs["index"].shape[0]
    num_prefix = num_nodes - num_queries
    query, _ = tb.rows(0, 1 << (num_queries - 1).bit_length(), num_queries)
    group = lax.div(head, layout.num_heads // layout.num_groups) * layout.state_size
    channels = outputs["x"].shape[1]
    sizes = (head * layout.head_dim + block * channels, channels), (group, layout.state_size)

    def copy(name: str, places: Any) -> None:
        if f"prefix {name}" in inputs:
            node, _ = tb.rows(0, 1 << (num_prefix - 1).bit_length(), num_prefix)
            outputs[name][node, *places] = inputs[f"prefix {name}"][node, *places]

    def of_section(section: Section, first: jax.Array, size: int) -> None:
        places, columns = (
            pl.ds(start + first, size) for start in (section.channel, section.column)
        )

        def new(node: jax.Array, there: jax.Array) -> jax.Array:
            index = node, columns
            loaded = tb.masked_load(inputs["inputs"], index, there, interpret=interpret)
            return scaled(loaded, section.multiplier)

        total, newest = conv.convolved(inputs, query, places, new, interpret=interpret)
        output = outputs[section.output]
        output[output.shape[0] - num_queries + query, :] = jax.nn.silu(total).astype(output.dtype)
        outputs["conv_input"][num_prefix + query, places] = newest
        copy("conv_input", [places])
        copy(section.output, [slice(None)])
        if "conv_state" in outputs:
            conv.replay_conv_state(inputs, outputs, places)

    x, *B_and_C = sections_of(layout)
    of_section(x, *sizes[0])
    for section in B_and_C:
        of_section(section, *sizes[1])
    raw = inputs["inputs"][query, layout.columns[4] + head]
    raw, bias = scaled(raw, layout.multipliers[4]), inputs["dt_bias"][head]
    outputs["dt"][num_prefix + query] = time_step(raw, bias, layout.dt_limit)
    copy("dt", [])
    tb.barrier(interpret)
