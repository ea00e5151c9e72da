"""`tree_conv1d` and `tree_conv1d_layer` as one Pallas-Triton kernel.

Passes: a program handles one row, one block of nodes and one block of channels. For each tap it
gathers one input row per node, from the array that holds it (conv state, previous tree, prefix of
this tree, or the query nodes); loads from the other arrays are masked off. A row is read from
memory once and by the up to K - 1 descendants in other programs from cache. Each channel is
convolved once; where heads of x or groups of B are repeated after the convolution, its program
writes all copies. The result is written once.

`tree_conv1d` has one output. A layer has several: a block of channels belongs to x, B or C, one
more block of columns holds the time steps, and the first block of nodes also writes its channels
of the conv state before the root. Blocks of prefix nodes copy their part of the pending record. No
program reads what another one writes.

Numerics: float32 from load to store, activation included, rounded once. The conv state is rounded
to the type of the inputs first, which is the type it had before it was stored. Taps are added from
the oldest to the newest by explicit multiply-adds: a node has the same bits in every tree.

Refuses x, B and C whose channels are not multiples of 16, and a convolution of width 1. Any numbers
of queries and nodes.
"""

import dataclasses
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
from pallas_kernels.tree_conv1d.sections import Section, TimeSteps, sections_of
from pallas_kernels.triton import Ref


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block."""

    queries: int  # nodes of a block
    channels: int  # most channels of a block; the largest power of two below that fits is taken
    num_warps: int  # Triton's


# The blocks are too small for the type to matter. With these nothing spills in bfloat16,
# and little in float32 from 16 nodes on (`benchmarks/results/spills.json`, sm_90).
DEFAULTS = BlockSizes(queries=8, channels=64, num_warps=4)


def unsupported(channels: int, width: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if width == 1:
        return "a convolution of width 1 has no state"
    return tb.unsupported_in_parts("channels", channels)


def unsupported_layer(layout: Mamba2Layout, width: int) -> str | None:
    """Why these shapes cannot run, or None."""
    blocks = (section.largest_block for section in sections_of(layout))
    return next(filter(None, (unsupported(size, width) for size in blocks)), None)


@functools.partial(jax.jit, static_argnames=("activation", "interpret", "blocks"))
def tree_conv1d(
    inputs: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    conv_gather_index: jax.Array,
    *,
    activation: str | None,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See `api.tree_conv1d`."""
    batch, _, num_channels = inputs.shape
    num_queries = conv_gather_index.shape[1]
    shape = jax.ShapeDtypeStruct((batch, num_queries, num_channels), inputs.dtype)
    return _call(
        {"inputs": inputs, "conv_state": conv_state, "index": conv_gather_index},
        {"weight": weight} | ({} if bias is None else {"bias": bias}),
        {"output": shape},
        sections=(Section("output", 0, 0, num_channels, 1, 1, 1, 1.0, pending=False),),
        time_steps=None,
        activation=activation,
        interpret=interpret,
        blocks=blocks,
    )["output"]


@functools.partial(jax.jit, static_argnames=("layout", "interpret", "blocks"))
def tree_conv1d_layer(
    projected: jax.Array,
    conv_weight: jax.Array,
    conv_bias: jax.Array | None,
    dt_bias: jax.Array,
    conv_state: jax.Array,
    conv_gather_index: jax.Array,
    prefix_pending: Mamba2Pending | None,
    previous: tuple[Mamba2Pending, jax.Array] | None,
    *,
    layout: Mamba2Layout,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[Mamba2Pending, jax.Array, jax.Array]:
    """See `api.tree_conv1d_layer`."""
    batch, num_queries, _ = projected.shape
    num_nodes = num_queries + (0 if prefix_pending is None else prefix_pending.x.shape[1])

    def like(*shape: int, dtype: Any = projected.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    def flat(heads: jax.Array) -> jax.Array:
        return heads.reshape(*heads.shape[:2], -1)

    in_groups = (layout.num_groups, layout.state_size)
    of_row = {"inputs": projected, "conv_state": conv_state, "index": conv_gather_index}
    outputs = {
        "x": like(num_nodes, layout.num_heads * layout.head_dim),
        "dt": like(num_nodes, layout.num_heads, dtype=jnp.float32),
        "B": like(num_nodes, layout.num_groups * layout.state_size),
        "C": like(num_queries, layout.num_groups * layout.state_size),
        "conv_input": like(num_nodes, layout.num_channels),
    }
    if prefix_pending is not None:
        x, dt, B, conv_input = prefix_pending
        of_row |= {"prefix x": flat(x), "prefix dt": dt, "prefix B": flat(B)}
        of_row |= {"prefix conv_input": conv_input}
    if previous is not None:
        old, replay_index = previous
        index = index_before(conv_gather_index, replay_index, old.conv_input.shape[1])
        of_row |= {"index": index, "replay_index": replay_index}
        of_row |= {"old conv_input": old.conv_input}
        outputs["conv_state"] = jax.ShapeDtypeStruct(conv_state.shape, conv_state.dtype)
    of_layer = {"weight": conv_weight, "dt_bias": dt_bias}
    results = _call(
        of_row,
        of_layer | ({} if conv_bias is None else {"bias": conv_bias}),
        outputs,
        sections=sections_of(layout),
        time_steps=TimeSteps(layout.columns[4], layout.multipliers[4], layout.dt_limit),
        activation="silu",
        interpret=interpret,
        blocks=blocks,
    )
    pending = Mamba2Pending(
        results["x"].reshape(batch, num_nodes, layout.num_heads, layout.head_dim),
        results["dt"],
        results["B"].reshape(batch, num_nodes, *in_groups),
        results["conv_input"],
    )
    C = results["C"].reshape(batch, num_queries, *in_groups)
    return pending, C, results.get("conv_state", conv_state)


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
    of_row: dict[str, jax.Array],
    of_layer: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    sections: Sequence[Section],
    time_steps: TimeSteps | None,
    activation: str | None,
    interpret: bool,
    blocks: BlockSizes | None,
) -> dict[str, jax.Array]:
    """Runs the kernel; programs see whole arrays, arrays of a row without their batch axis."""
    blocks = blocks or DEFAULTS
    batch, num_queries, _ = of_row["index"].shape
    num_prefix = of_row["prefix dt"].shape[1] if "prefix dt" in of_row else 0
    block_nodes = min(blocks.queries, 1 << (max(num_queries, num_prefix) - 1).bit_length())
    channels = math.gcd(blocks.channels, *(section.largest_block for section in sections))
    num_channel_blocks = sum(section.size for section in sections) // channels

    def row(array: Any) -> tuple[Any, pl.BlockSpec]:
        shape = array.shape[1:]
        return array, pl.BlockSpec((None, *shape), lambda c, i, b: (b,) + (0,) * len(shape))

    def whole(array: jax.Array) -> tuple[Any, pl.BlockSpec]:
        return array, pl.BlockSpec(array.shape, lambda c, i, b: (0,) * array.ndim)

    inputs = {name: row(array) for name, array in of_row.items()}
    inputs |= {name: whole(array) for name, array in of_layer.items()}
    return tb.call_by_name(
        functools.partial(
            _kernel,
            sections=sections,
            time_steps=time_steps,
            num_channel_blocks=num_channel_blocks,
            block_nodes=block_nodes,
            block_channels=channels,
            activation=activation,
            interpret=interpret,
        ),
        inputs,
        {name: row(shape) for name, shape in outputs.items()},
        in_place={},
        name="tree_conv1d",
        num_warps=blocks.num_warps,
        interpret=interpret,
        in_one_order=True,
        grid=(
            num_channel_blocks + (time_steps is not None),
            pl.cdiv(num_queries, block_nodes) + pl.cdiv(num_prefix, block_nodes),
            batch,
        ),
    )


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    sections: Sequence[Section],
    time_steps: TimeSteps | None,
    num_channel_blocks: int,
    block_nodes: int,
    block_channels: int,
    activation: str | None,
    interpret: bool,
) -> None:
    """Refs by name, without the batch axis.

    inputs: inputs [Q, X] (or [N, C]), conv_state [K - 1, C], index [Q, K], weight [K, C], bias [C],
    dt_bias [H], replay_index [K - 1], old conv_input [O, C]; and of the first N - Q nodes
    prefix x [., HP], prefix dt [., H], prefix B [., G S], prefix conv_input [., C].
    outputs: output [Q, C]; or x [N, HP], dt [N, H], B [N, G S], C [Q, G S], conv_input [N, C],
    conv_state [K - 1, C].
    """
    block, node_block = pl.program_id(0), pl.program_id(1)
    num_queries = inputs["index"].shape[0]
    num_prefix = inputs["prefix dt"].shape[0] if "prefix dt" in inputs else 0
    num_query_blocks = pl.cdiv(num_queries, block_nodes)
    query, _ = tb.rows(node_block * block_nodes, block_nodes, num_queries)
    prefix, _ = tb.rows((node_block - num_query_blocks) * block_nodes, block_nodes, num_prefix)
    is_query = node_block < num_query_blocks

    def for_block(here: jax.Array, new: Callable[[], None], old: Callable[[], None]) -> None:
        """Runs `new` for query nodes and `old` for prefix nodes."""
        pl.when(here & is_query if num_prefix else here)(new)
        if num_prefix:
            pl.when(here & ~is_query)(old)

    program = _Program(inputs, outputs, sections, block * block_channels, block_channels)

    def convolve() -> None:
        value = program.convolved(query, activation, interpret)
        program.write(query, num_prefix, value)
        if "conv_input" in outputs:
            program.write_conv_inputs(query, num_prefix)
        if "conv_state" in outputs:
            pl.when(node_block == 0)(program.replay_conv_state)

    for_block(block < num_channel_blocks, convolve, lambda: program.copy_prefix(prefix))

    if time_steps is not None:
        num_heads = outputs["dt"].shape[1]
        head = tb.rows(0, tb.padded_size(num_heads), num_heads)[0][None, :]

        def step() -> None:
            raw = inputs["inputs"][query[:, None], time_steps.column + head]
            raw, bias = scaled(raw, time_steps.multiplier), inputs["dt_bias"][head]
            outputs["dt"][num_prefix + query[:, None], head] = time_step(
                raw, bias, time_steps.limit
            )

        def copy_step() -> None:
            outputs["dt"][prefix[:, None], head] = inputs["prefix dt"][prefix[:, None], head]

        for_block(block == num_channel_blocks, step, copy_step)


@dataclasses.dataclass(frozen=True)
class _Program:
    """One block of channels `[c]`, all of one section."""

    inputs: dict[str, Ref]  # refs by name
    outputs: dict[str, Ref]
    sections: Sequence[Section]  # x, B and C, or one for all channels
    channel: jax.Array  # the first of the block, in the convolution
    size: int  # channels of the block

    @property
    def channels(self) -> slice | pl.Slice:
        """In the convolution."""
        return pl.ds(self.channel, self.size)

    @property
    def columns(self) -> slice | pl.Slice:
        """In the inputs."""
        columns = [section.column_of(self.channel - section.channel) for section in self.sections]
        return pl.ds(self._of_section(columns), self.size)

    def _of_section(self, values: Sequence[Any]) -> jax.Array:
        """The value of the block's section. One code for all sections: a third of the program."""
        value = values[-1]
        for section, other in reversed(list(zip(self.sections[:-1], values[:-1], strict=True))):
            value = jnp.where(self.channel < section.channel + section.size, other, value)
        return value

    def _for_section(self, body: Callable[[Section, jax.Array], None]) -> None:
        """Calls `body` with the block's section and the first channel in it."""
        for section in self.sections:
            channel = self.channel - section.channel
            is_here = (channel >= 0) & (channel < section.size)
            pl.when(is_here)(functools.partial(body, section, channel))

    def _scaled(self, value: jax.Array) -> jax.Array:
        """Inputs times the section's multiplier, rounded."""
        multipliers = [section.multiplier for section in self.sections]
        if set(multipliers) == {1.0}:
            return value
        multiplier = self._of_section([jnp.float32(number) for number in multipliers])
        return (value.astype(jnp.float32) * multiplier).astype(value.dtype)

    def convolved(self, query: jax.Array, activation: str | None, interpret: bool) -> jax.Array:
        """The convolution of query nodes `[q, c]`, float32."""
        # The index counts through the rows of these arrays.
        names = ("conv_state", "old conv_input", "prefix conv_input", "inputs")
        refs = [self.inputs[name] for name in names if name in self.inputs]
        starts = list(itertools.accumulate((ref.shape[0] for ref in refs[:-1]), initial=0))
        weight, dtype = self.inputs["weight"], refs[-1].dtype
        total = jnp.zeros((query.shape[0], self.size), jnp.float32)
        if "bias" in self.inputs:
            total = total + self.inputs["bias"][self.channels].astype(jnp.float32)[None, :]
        for tap in range(weight.shape[0]):
            row = self.inputs["index"][query, tap]
            value = jnp.zeros(total.shape, dtype)
            for ref, start in zip(refs, starts, strict=True):
                length = ref.shape[0]
                there = ((row >= start) & (row < start + length))[:, None]
                is_new = ref is refs[-1]
                index = (
                    jnp.clip(row - start, 0, length - 1),
                    self.columns if is_new else self.channels,
                )
                loaded = tb.masked_load(ref, index, there, interpret=interpret).astype(dtype)
                loaded = self._scaled(loaded) if is_new else loaded
                value = jnp.where(there, loaded, value)
            of_tap = weight[tap, self.channels].astype(jnp.float32)[None, :]
            total = tb.multiply_add(value.astype(jnp.float32), of_tap, total, interpret=interpret)
        return jax.nn.silu(total) if activation == "silu" else total

    def write(self, query: jax.Array, num_prefix: int, value: jax.Array) -> None:
        """Writes the convolution of query nodes, and its copies for neighbouring heads."""

        def store(section: Section, channel: jax.Array) -> None:
            output = self.outputs[section.output]
            node = num_prefix + query if section.pending else query
            for column in section.copies_of(channel):
                output[node, pl.ds(column, self.size)] = value.astype(output.dtype)

        self._for_section(store)

    def write_conv_inputs(self, query: jax.Array, num_prefix: int) -> None:
        """Writes the inputs of the convolution of query nodes to the pending record."""
        value = self._scaled(self.inputs["inputs"][query, self.columns])
        self.outputs["conv_input"][num_prefix + query, self.channels] = value

    def copy_prefix(self, node: jax.Array) -> None:
        """Copies the prefix nodes' part of the pending record."""
        value = self.inputs["prefix conv_input"][node, self.channels]
        self.outputs["conv_input"][node, self.channels] = value

        def copy(section: Section, channel: jax.Array) -> None:
            for column in section.copies_of(channel) if section.pending else ():
                columns = pl.ds(column, self.size)
                value = self.inputs[f"prefix {section.output}"][node, columns]
                self.outputs[section.output][node, columns] = value

        self._for_section(copy)

    def replay_conv_state(self) -> None:
        """Writes the conv state after the previous tree's path."""
        state, old = self.inputs["conv_state"], self.inputs["old conv_input"]
        num_before = state.shape[0]
        column, _ = tb.rows(0, tb.padded_size(num_before), num_before)
        row = self.inputs["replay_index"][column]
        kept = state[jnp.minimum(row, num_before - 1), self.channels]
        new = old[jnp.clip(row - num_before, 0, old.shape[0] - 1), self.channels]
        value = jnp.where((row < num_before)[:, None], kept, new.astype(kept.dtype))
        self.outputs["conv_state"][column, self.channels] = value
