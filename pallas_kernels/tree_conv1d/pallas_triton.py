"""`tree_conv1d`, `tree_conv1d_layer` and `short_conv_layer` as one Pallas-Triton kernel.

Passes: a program handles one row, one block of nodes and one block of channels. For each tap it
gathers one input row per node, from the array that holds it (conv state, previous tree, prefix of
this tree, or the query nodes); loads from the other arrays are masked off. A row is read from
memory once and by the up to K - 1 descendants in other programs from cache. Each channel is
convolved once; where heads of x or groups of B are repeated after the convolution, its program
writes all copies. The result is written once.

`tree_conv1d` has one output. A layer has several: a block of channels belongs to x, B or C, one
more block of columns holds the time steps, and the first block of nodes also writes its channels
of the conv state before the root. Blocks of prefix nodes copy their part of the pending record. No
program reads what another one writes. A gated short convolution multiplies its inputs while it
loads them, and its output before it writes it.

Numerics: float32 from load to store, activation included, rounded once. The conv state is rounded
to the type of the inputs first, which is the type it had before it was stored. Taps are added from
the oldest to the newest by explicit multiply-adds: a node has the same bits in every tree.

Refuses x, B and C whose channels are not multiples of 16, and a convolution of width 1. Any numbers
of queries and nodes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.numerics import scaled
from pallas_kernels.tree_conv1d.layout import Mamba2Layout, Mamba2Pending, time_step
from pallas_kernels.tree_conv1d.sections import Section, sections_of
from pallas_kernels.triton import Ref

# Nodes and channels of a block; an axis that is smaller is one block, and the largest power of two
# of channels that fits is taken. They are too small for the type to matter. With these and 4 warps
# nothing spills in bfloat16, and little in float32 from 16 nodes on
# (`benchmarks/results/spills.json`, sm_90).
_BLOCK_NODES, _BLOCK_CHANNELS = 8, 64


def unsupported(channels: int, width: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if width == 1:
        return "a convolution of width 1 has no state"
    return tb.unsupported_in_parts("channels", channels)


def unsupported_layer(layout: Mamba2Layout, width: int) -> str | None:
    """Why these shapes cannot run, or None."""
    blocks = (section.largest_block for section in sections_of(layout))
    return next(filter(None, (unsupported(size, width) for size in blocks)), None)


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def tree_conv1d(
    *arrays: Any,
    activation: str | None,
    interpret: bool = False,
) -> jax.Array:
    """See `api.tree_conv1d`, whose arrays these are."""
    inputs, conv_state, weight, bias, conv_gather_index = arrays
    batch, _, num_channels = inputs.shape
    num_queries = conv_gather_index.shape[1]
    shape = jax.ShapeDtypeStruct((batch, num_queries, num_channels), inputs.dtype)
    return _call(
        {"inputs": inputs, "conv_state": conv_state, "index": conv_gather_index},
        {"weight": weight, "bias": bias},
        {"output": shape},
        sections=(Section("output", 0, 0, num_channels, 1, 1, 1, 1.0, pending=False),),
        layout=None,
        activation=activation,
        interpret=interpret,
    )["output"]


@functools.partial(jax.jit, static_argnames=("layout", "interpret"))
def tree_conv1d_layer(
    *arrays: Any,
    layout: Mamba2Layout,
    interpret: bool = False,
) -> tuple[Mamba2Pending, jax.Array, jax.Array]:
    """See `api.tree_conv1d_layer`, whose arrays these are."""
    of_row, of_layer, outputs = arrays_of_layer(*arrays, layout=layout)

    def in_columns(array: Any) -> Any:
        """Heads and groups as neighbouring columns."""
        if len(array.shape) < 4:
            return array
        shape = (*array.shape[:2], math.prod(array.shape[2:]))
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype)
        return array.reshape(shape)

    results = _call(
        {name: in_columns(array) for name, array in of_row.items()},
        of_layer,
        {name: in_columns(shape) for name, shape in outputs.items()},
        sections=sections_of(layout),
        layout=layout,
        activation="silu",
        interpret=interpret,
    )
    results = {name: array.reshape(outputs[name].shape) for name, array in results.items()}
    pending = Mamba2Pending(*(results[name] for name in Mamba2Pending._fields))
    return pending, results["C"], results.get("conv_state", arrays[4])


@functools.partial(jax.jit, static_argnames="interpret")
def short_conv_layer(*arrays: Any, interpret: bool = False) -> tuple[jax.Array, ...]:
    """See `api.short_conv_layer`, whose arrays these are."""
    projected, weight, bias, conv_state, index, prefix, previous = arrays
    batch, num_queries, _ = projected.shape
    num_nodes, channels = num_queries, weight.shape[-1]
    of_row = {"inputs": projected, "conv_state": conv_state}
    if prefix is not None:
        of_row["prefix conv_input"] = prefix
        num_nodes += prefix.shape[1]
    nodes = jax.ShapeDtypeStruct((batch, num_nodes, channels), projected.dtype)
    outputs = {"conv_input": nodes, "output": nodes.update(shape=(batch, num_queries, channels))}
    if previous is not None:
        old, replay_index = previous
        index = index_before(index, replay_index, old.shape[1])
        of_row |= {"replay_index": replay_index, "old conv_input": old}
        outputs["conv_state"] = jax.typeof(conv_state)
    results = _call(
        of_row | {"index": index},
        {"weight": weight, "bias": bias},
        outputs,
        # After the gates of the inputs and of the outputs.
        sections=(Section("output", 0, 2 * channels, channels, 1, 1, 1, 1.0, pending=False),),
        layout=None,
        activation=None,
        is_gated=True,
        interpret=interpret,
    )
    return results["output"], results["conv_input"], results.get("conv_state", conv_state)


def arrays_of_layer(
    projected: Any,
    conv_weight: jax.Array,
    conv_bias: jax.Array | None,
    dt_bias: jax.Array,
    conv_state: jax.Array,
    conv_gather_index: jax.Array,
    prefix_pending: Mamba2Pending | None,
    previous: Any,
    *,
    layout: Mamba2Layout,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Inputs of rows and of the layer, and the shapes of outputs, by the kernel's names."""
    batch, num_queries, _ = projected.shape
    num_nodes = num_queries + (0 if prefix_pending is None else prefix_pending.x.shape[1])

    def like(*shape: int, dtype: Any = projected.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    in_groups = (layout.num_groups, layout.state_size)
    of_row = {"inputs": projected, "conv_state": conv_state, "index": conv_gather_index}
    of_layer = {"weight": conv_weight, "bias": conv_bias, "dt_bias": dt_bias}
    outputs = {
        "x": like(num_nodes, layout.num_heads, layout.head_dim),
        "dt": like(num_nodes, layout.num_heads, dtype=jnp.float32),
        "B": like(num_nodes, *in_groups),
        "C": like(num_queries, *in_groups),
        "conv_input": like(num_nodes, layout.num_channels),
    }
    if prefix_pending is not None:
        named = zip(prefix_pending._fields, prefix_pending, strict=True)
        of_row |= {f"prefix {name}": array for name, array in named}
    if previous is not None:
        old, replay_index = previous
        index = index_before(conv_gather_index, replay_index, old.conv_input.shape[1])
        of_row |= {"index": index, "replay_index": replay_index, "old conv_input": old.conv_input}
        outputs["conv_state"] = jax.typeof(conv_state)
    return of_row, of_layer, outputs


def index_before(index: jax.Array, replay_index: jax.Array, num_replayed: int) -> jax.Array:
    """The conv gather index into `concat(old conv_state, old nodes, nodes)`.

    Given is one into `concat(conv_state [K - 1], nodes)`; `replay_index` says which rows of
    `concat(old conv_state, old nodes)` that conv state is.
    """
    num_before = replay_index.shape[1]
    flat = index.reshape(index.shape[0], -1)
    above = jnp.take_along_axis(replay_index, jnp.minimum(flat, num_before - 1), axis=1)
    return jnp.where(flat < num_before, above, flat + num_replayed).reshape(index.shape)


def _call(
    of_row: dict[str, Any],
    of_layer: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    sections: Sequence[Section],
    layout: Mamba2Layout | None,
    activation: str | None,
    is_gated: bool = False,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Runs the kernel; programs see whole arrays, arrays of a row without their batch axis."""
    batch, num_queries, _ = of_row["index"].shape
    num_prefix = of_row["prefix conv_input"].shape[1] if "prefix conv_input" in of_row else 0
    block_nodes = min(_BLOCK_NODES, 1 << (max(num_queries, num_prefix) - 1).bit_length())
    channels = math.gcd(_BLOCK_CHANNELS, *(section.largest_block for section in sections))
    num_channel_blocks = sum(section.size for section in sections) // channels

    def row(array: Any) -> tuple[Any, pl.BlockSpec]:
        return tb.blocked(array, "b.."[: len(array.shape)], "cib")

    inputs = {name: row(array) for name, array in of_row.items()}
    for name, array in of_layer.items():
        if array is not None:
            inputs[name] = tb.blocked(array, ".."[: array.ndim], "cib")
    return tb.call_by_name(
        functools.partial(
            _kernel,
            sections=sections,
            layout=layout,
            num_channel_blocks=num_channel_blocks,
            block_nodes=block_nodes,
            block_channels=channels,
            activation=activation,
            is_gated=is_gated,
            interpret=interpret,
        ),
        inputs,
        {name: row(shape) for name, shape in outputs.items()},
        name="tree_conv1d",
        num_warps=4,
        interpret=interpret,
        in_one_order=True,
        grid=(
            num_channel_blocks + (layout is not None),
            pl.cdiv(num_queries, block_nodes) + pl.cdiv(num_prefix, block_nodes),
            batch,
        ),
    )


def convolved(
    inputs: dict[str, Ref],
    query: jax.Array,  # [n]
    channels: Any,  # a slice
    new: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Some channels `[n, c]` of some queries, float32 before the activation; and their inputs.

    `new` gives inputs of query nodes, by their numbers and whether they are ones.
    """
    # The index counts through the rows of these arrays.
    names = ("conv_state", "old conv_input", "prefix conv_input", "inputs")
    refs = [inputs[name] for name in names if name in inputs]
    starts = itertools.accumulate((ref.shape[0] for ref in refs), initial=0)
    ranges = list(itertools.pairwise(starts))
    weight, dtype = inputs["weight"], refs[-1].dtype
    total = jnp.zeros((query.shape[0], channels.size), jnp.float32)
    if "bias" in inputs:
        total = total + inputs["bias"][channels].astype(jnp.float32)[None, :]
    for tap in range(weight.shape[0]):
        row = inputs["index"][query, tap]
        value = jnp.zeros(total.shape, dtype)
        for ref, (start, end) in zip(refs, ranges, strict=True):
            there = ((row >= start) & (row < end))[:, None]
            place = jnp.clip(row, start, end - 1) - start
            if ref is refs[-1]:
                loaded = new(place, there)
            else:
                loaded = tb.masked_load(ref, (place, channels), there, interpret=interpret)
            value = jnp.where(there, loaded.astype(dtype), value)
        of_tap = weight[tap, channels].astype(jnp.float32)[None, :]
        total = tb.multiply_add(value.astype(jnp.float32), of_tap, total, interpret=interpret)
    return total, value  # the newest tap is of the node itself


def replay_conv_state(inputs: dict[str, Ref], outputs: dict[str, Ref], channels: Any) -> None:
    """Writes some channels of the conv state after the previous tree's path."""
    state, old = inputs["conv_state"], inputs["old conv_input"]
    num_before = state.shape[0]
    place, _ = tb.rows(0, tb.padded_size(num_before), num_before)
    row = inputs["replay_index"][place]
    kept = state[jnp.minimum(row, num_before - 1), channels]
    new = old[jnp.clip(row - num_before, 0, old.shape[0] - 1), channels]
    value = jnp.where((row < num_before)[:, None], kept, new.astype(kept.dtype))
    outputs["conv_state"][place, channels] = value


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    sections: Sequence[Section],
    layout: Mamba2Layout | None,
    num_channel_blocks: int,
    block_nodes: int,
    block_channels: int,
    activation: str | None,
    is_gated: bool,
    interpret: bool,
) -> None:
    """Refs by name, without the batch axis.

    inputs: inputs [Q, X] (or [N, C]; gated [Q, 3 C]), conv_state [K - 1, C], index [Q, K],
    weight [K, C], bias [C], dt_bias [H], replay_index [K - 1], old conv_input [O, C]; and of the
    first N - Q nodes prefix x [., HP], prefix dt [., H], prefix B [., G S], prefix conv_input
    [., C].
    outputs: output [Q, C]; or x [N, HP], dt [N, H], B [N, G S], C [Q, G S]; conv_input [N, C],
    conv_state [K - 1, C].
    """
    block, node_block = pl.program_id(0), pl.program_id(1)
    num_queries = inputs["index"].shape[0]
    num_prefix = inputs["prefix conv_input"].shape[0] if "prefix conv_input" in inputs else 0
    num_query_blocks = pl.cdiv(num_queries, block_nodes)
    query, _ = tb.rows(node_block * block_nodes, block_nodes, num_queries)
    prefix, _ = tb.rows((node_block - num_query_blocks) * block_nodes, block_nodes, num_prefix)
    is_query = node_block < num_query_blocks
    # All channels of a block are of one section.
    channel = block * block_channels
    channels = pl.ds(channel, block_channels)
    num_channels = inputs["weight"].shape[1]

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return (left.astype(jnp.float32) * right.astype(jnp.float32)).astype(left.dtype)

    def of_section(values: Sequence[Any]) -> jax.Array:
        """The value of the block's section. One code for all sections: a third of the program."""
        value = values[-1]
        for section, before in list(zip(sections, values, strict=True))[-2::-1]:
            value = jnp.where(channel < section.channel + section.size, before, value)
        return value

    places = [section.column_of(channel - section.channel) for section in sections]
    columns = pl.ds(of_section(places), block_channels)
    multipliers = [section.multiplier for section in sections]

    def for_block(here: jax.Array, new: Callable[[], None], old: Callable[[], None]) -> None:
        """Runs `new` for query nodes and `old` for prefix nodes."""
        pl.when(here & is_query if num_prefix else here)(new)
        if num_prefix:
            pl.when(here & ~is_query)(old)

    def new(node: jax.Array, there: jax.Array) -> jax.Array:
        """Inputs times their gates, or times the section's multiplier, rounded."""

        def load(columns: Any) -> jax.Array:
            return tb.masked_load(inputs["inputs"], (node, columns), there, interpret=interpret)

        value = load(columns)
        if is_gated:
            return product(load(channels), value)
        if set(multipliers) == {1.0}:
            return value
        multiplier = of_section([jnp.float32(number) for number in multipliers])
        return (value.astype(jnp.float32) * multiplier).astype(value.dtype)

    def convolve() -> None:
        total, newest = convolved(inputs, query, channels, new, interpret=interpret)
        if is_gated:
            gate = inputs["inputs"][query, pl.ds(num_channels + channel, block_channels)]
            total = product(gate, total.astype(gate.dtype))
        write(query, lambda *_: jax.nn.silu(total) if activation == "silu" else total)
        if "conv_input" in outputs:
            outputs["conv_input"][num_prefix + query, channels] = newest
        if "conv_state" in outputs:
            pl.when(node_block == 0)(lambda: replay_conv_state(inputs, outputs, channels))

    def copy_prefix() -> None:
        outputs["conv_input"][prefix, channels] = inputs["prefix conv_input"][prefix, channels]
        write(prefix, lambda name, places: inputs[f"prefix {name}"][prefix, places])

    def write(node: jax.Array, values: Callable[[str, Any], jax.Array]) -> None:
        """Writes queries or prefix nodes of the block's section, for neighbouring heads too."""
        is_prefix = node is prefix
        for section in sections:
            if is_prefix and not section.pending:
                continue
            first = channel - section.channel

            @pl.when((first >= 0) & (first < section.size))
            def _(section: Section = section, first: jax.Array = first) -> None:
                output = outputs[section.output]
                row = node + num_prefix if section.pending and not is_prefix else node
                copies = [pl.ds(start, block_channels) for start in section.copies_of(first)]
                value = values(section.output, copies[0]).astype(output.dtype)
                for copy in copies:
                    output[row, copy] = value

    for_block(block < num_channel_blocks, convolve, copy_prefix)
    if layout is None:
        return
    num_heads = outputs["dt"].shape[1]
    head = tb.rows(0, tb.padded_size(num_heads), num_heads)[0][None, :]

    def step() -> None:
        raw = inputs["inputs"][query[:, None], layout.columns[4] + head]
        raw, bias = scaled(raw, layout.multipliers[4]), inputs["dt_bias"][head]
        dt = time_step(raw, bias, layout.dt_limit)
        outputs["dt"][num_prefix + query[:, None], head] = dt

    def copy_step() -> None:
        outputs["dt"][prefix[:, None], head] = inputs["prefix dt"][prefix[:, None], head]

    for_block(block == num_channel_blocks, step, copy_step)
