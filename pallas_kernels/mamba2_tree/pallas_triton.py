"""`mamba2_tree` as one Pallas-Triton kernel that updates the state in place.

Passes: a program handles one row, one head and one block of its channels. First it convolves its x,
B and C, straight from the projection and the inputs before, and writes them into the tree's record;
from there, which is the L1 cache mostly, it then does what `replay_tree_scan` does, with the state
read once and written once. All heads of a group convolve its B and C, and write the same numbers to
the same place: loads and arithmetic for launches. Outputs are gated before they are written. A norm
behind the gate is `Unscaled`: a program multiplies by the weight and writes its part of each row's
mean square; what all programs are needed for is left to who reads the product with the next matrix.
One more program a head copies what went into the convolution into the record: a kind of its own, so
that neither holds the other's registers.

If the old record is in a queue (see `records`), the new one goes to its free place, in the same
memory, where no program reads; a counter of the queue tells both places.

Each tap's row is looked up in one table, which depends on the trees alone and so is made once for
all layers: rows of the old conv state, the previous tree, the grown nodes and the query nodes.

Numerics: those of `tree_conv1d`, `replay` and `tree_scan`, whose code this is in part. What the
convolution gives is rounded to the type of the inputs, as it is where it is recorded. Outputs are
rounded once, after gate and weight; what is squared is not rounded.

Refuses what `replay_tree_scan` refuses, and a convolution of width 1. Any numbers of nodes.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import triton as tb
from pallas_kernels.head_blocks import AtPlace, HeadBlocks, channels_of, in_any_place
from pallas_kernels.mamba2_tree.config import BlockSizes, block_sizes
from pallas_kernels.mamba2_tree.layout import Layout, time_step
from pallas_kernels.mamba2_tree.records import (
    Mamba2Pending,
    RecordQueue,
    free_place,
    place_after,
)
from pallas_kernels.numerics import Unscaled, scaled
from pallas_kernels.replay.pallas_triton import along_path
from pallas_kernels.replay_tree_scan.pallas_triton import outputs_of_tree
from pallas_kernels.replay_tree_scan.pallas_triton import unsupported as unsupported_state

_RECORD = Mamba2Pending._fields


def unsupported(layout: Layout, width: int, dtype: DTypeLike) -> str | None:
    """Why these shapes cannot run, or None."""
    if width == 1:
        return "a convolution of width 1 has no state"
    return unsupported_state(layout.head_dim, layout.state_size, dtype)


def mamba2_tree(
    projected,
    weights,
    ssm,
    conv_state,
    window,
    ancestor_mask,
    *,
    layout,
    grown,
    previous,
    gated,
    norm_weight,
    norm_epsilon,
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.mamba2_tree`."""
    queued = previous is not None and isinstance(previous.pending, RecordQueue)
    blocks = blocks or block_sizes(projected.dtype, layout.state_size, queued=queued)
    batch, num_queries, _ = projected.shape
    num_nodes = ancestor_mask.shape[1]
    num_heads, head_dim = layout.num_heads, layout.head_dim
    num_groups, state_size = layout.num_groups, layout.state_size
    channels = channels_of(blocks.state, head_dim, state_size)
    last_block = head_dim // channels - 1

    def channel_block(p):
        return jnp.minimum(p, last_block)

    specs = HeadBlocks(channels, state_size, num_heads // num_groups, channel_block)

    def of_row(array):
        shape = array.shape[1:]
        return pl.BlockSpec((None, *shape), lambda b, h, p: (b,) + (0,) * len(shape))

    def of_all(array):
        return pl.BlockSpec(array.shape, lambda b, h, p: (0,) * array.ndim)

    def block_of_row(h, p):
        return h * (last_block + 1) + channel_block(p)

    some_of_channels = pl.BlockSpec((channels,), lambda b, h, p: (block_of_row(h, p),))

    def of_record(count):
        of_inputs = pl.BlockSpec((None, count, layout.num_channels), lambda b, h, p: (b, 0, 0))
        return specs.of_channels(count), specs.of_head(count), specs.of_group(count), of_inputs

    def named(prefix, record, record_specs):
        pairs = zip(record, record_specs, strict=True)
        return {prefix + name: pair for name, pair in zip(_RECORD, pairs, strict=True)}

    def like(*shape, dtype=projected.dtype):
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    inputs = {
        "ssm": (ssm, specs.state),
        "projected": (projected, of_row(projected)),
        "conv_state": (conv_state, of_row(conv_state)),
        "conv_weight": (weights.conv_weight, of_all(weights.conv_weight)),
        "dt_bias": (weights.dt_bias, specs.one_of_heads),
        "A_log": (weights.A_log, specs.one_of_heads),
        "D": (
            weights.D,
            specs.one_of_heads if weights.D.shape[0] == num_heads else some_of_channels,
        ),
        "mask": (ancestor_mask, of_row(ancestor_mask)),
    }
    if weights.conv_bias is not None:
        inputs["conv_bias"] = (weights.conv_bias, of_all(weights.conv_bias))
    if norm_weight is not None:
        inputs["norm_weight"] = (norm_weight, some_of_channels)
    outputs = {
        "y": (like(num_queries, num_heads, head_dim), specs.of_channels(num_queries)),
        # For this program itself.
        "C": (like(num_queries, num_groups, state_size), specs.of_group(num_queries)),
    }
    if norm_weight is not None:
        outputs["mean_squares"] = (
            like(num_queries, num_heads * (last_block + 1), dtype=jnp.float32),
            pl.BlockSpec((None, num_queries, None), lambda b, h, p: (b, 0, block_of_row(h, p))),
        )
    num_replayed = 0
    sources = window
    in_place = {}
    if previous is not None:
        old, path, back = previous
        num_replayed = path.shape[1]
        sources = rows_before(window, back, num_replayed)
        inputs |= {"path": (path, of_row(path)), "back": (back, of_row(back))}
        old_specs = of_record(num_replayed)
        if queued:
            oldest, old = old.oldest, old.records
            old_specs = [in_any_place(spec, len(old.x)) for spec in old_specs]
            # Not in place: all programs read this one, and one of them writes the next.
            inputs["oldest"] = outputs["oldest"] = (oldest, of_all(oldest))
            outputs |= named("", old, old_specs)
            in_place = {f"old {name}": name for name in _RECORD}
        inputs |= named("old ", old, old_specs)
        outputs |= {name: inputs[name] for name in ("ssm", "conv_state")}
        in_place["ssm"] = "ssm"
    inputs["sources"] = (sources, of_row(sources))
    if grown is not None:
        inputs |= named("grown ", grown, of_record(grown.x.shape[1]))
    if not queued:
        new = (
            like(num_nodes, num_heads, head_dim),
            like(num_nodes, num_heads, dtype=jnp.float32),
            like(num_nodes, num_groups, state_size),
            like(num_nodes, layout.num_channels),
        )
        outputs |= named("", new, of_record(num_nodes))
    results = tb.call_by_name(
        functools.partial(
            _kernel,
            layout=layout,
            gated=gated,
            blocks=dataclasses.replace(
                blocks,
                replayed=min(blocks.replayed, tb.padded_size(num_replayed or 1)),
                queries=min(blocks.queries, tb.padded_size(num_queries)),
                keys=min(blocks.keys, tb.padded_size(num_nodes)),
                part=min(blocks.part, state_size),
            ),
            interpret=interpret,
        ),
        inputs,
        outputs,
        in_place=in_place,
        name="mamba2_tree",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, last_block + 2),
    )
    record = Mamba2Pending(*(results[name] for name in _RECORD))
    left = RecordQueue(record, results["oldest"]) if queued else record
    y = results["y"].reshape(batch, num_queries, -1)
    if norm_weight is not None:
        y = Unscaled(y, results["mean_squares"], norm_epsilon)
    return y, left, results.get("ssm", ssm), results.get("conv_state", conv_state)


def rows_before(window, back, num_replayed):
    """`window` with its rows of the conv state looked up in what that state is made of.

    Args:
        window: rows of `concat(conv_state [K - 1], nodes)`.
        back: the rows of `concat(old conv_state [K - 1], old nodes)` that are `conv_state`.
        num_replayed: how many old nodes there are.

    Returns:
        Rows of `concat(old conv_state, old nodes, nodes)`.
    """
    num_before = back.shape[1]
    flat = window.reshape(window.shape[0], -1)
    above = jnp.take_along_axis(back, jnp.minimum(flat, num_before - 1), axis=1)
    return jnp.where(flat < num_before, above, flat + num_replayed).reshape(window.shape)


@dataclasses.dataclass(frozen=True)
class _Section:
    """One of x, B and C, as a program sees it.

    Attributes:
        column, channel: where its numbers start in the projection and in the convolution.
        size: how many they are.
        multiplier: of the projection.
        is_first: whether this is the first head with these numbers, which records them.
    """

    column: jax.Array
    channel: jax.Array
    size: int
    multiplier: float
    is_first: jax.Array


@dataclasses.dataclass(frozen=True)
class _Program:
    """What both kinds of programs know.

    Attributes:
        inputs, outputs: refs by name.
        layout, gated, blocks, interpret: as elsewhere.
        num_grown: nodes before the query nodes.
        head: its number.
        first: the first channel of the head that the program works on.
        x, B, C: the sections of the head, or of a block of its channels.
    """

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    layout: Layout
    gated: bool
    blocks: BlockSizes
    interpret: bool
    num_grown: int
    head: jax.Array
    first: jax.Array | int
    x: _Section
    B: _Section
    C: _Section

    @property
    def num_queries(self) -> int:
        return self.outputs["y"].shape[0]

    def for_blocks(self, num_rows: int, width: int, body) -> None:
        """Calls `body` with the rows, the first column and the columns of one block at a time."""
        # One loop, not unrolled: else ptxas loads for many blocks at once, and spills.
        size, columns = self.blocks.queries, min(self.blocks.part, width)
        across = width // columns

        def step(i, _):
            rows, _ = tb.rows(lax.div(i, across) * size, size, num_rows)
            body(rows, lax.rem(i, across) * columns, columns)

        lax.fori_loop(0, pl.cdiv(num_rows, size) * across, step, None)

    def copy_grown(self, name: str, first, width: int) -> None:
        """Records again what was recorded of the grown nodes."""

        def copy(node, start, size):
            part = pl.ds(first + start, size)
            self.outputs[name][node, part] = self.inputs[f"grown {name}"][node, part]

        if self.num_grown:
            self.for_blocks(self.num_grown, width, copy)

    def projection(self, query, section: _Section, start, size: int):
        """What goes into the convolution, of query nodes."""
        columns = pl.ds(section.column + start, size)
        return scaled(self.inputs["projected"][query, columns], section.multiplier)

    def convolved(self, query, section: _Section, start, size: int):
        """What comes out of it, activated; float32."""
        # What the taps read, and the rows of `sources` where each ends.
        names = ("conv_state", "old conv_input", "grown conv_input")
        before = [self.inputs[name] for name in names if name in self.inputs]
        ends = list(itertools.accumulate(array.shape[0] for array in before))
        channels = pl.ds(section.channel + start, size)
        total = jnp.zeros((1, size), jnp.float32)
        if "conv_bias" in self.inputs:
            total = total + self.inputs["conv_bias"][channels].astype(jnp.float32)[None, :]
        for tap in range(self.inputs["conv_weight"].shape[0]):
            row = self.inputs["sources"][query, tap]
            new = jnp.clip(row - ends[-1], 0, self.num_queries - 1)
            value = self.projection(new, section, start, size)
            for array, end in reversed(list(zip(before, ends, strict=True))):
                length = array.shape[0]
                there = array[jnp.clip(row - (end - length), 0, length - 1), channels]
                value = jnp.where((row < end)[:, None], there.astype(value.dtype), value)
            weight = self.inputs["conv_weight"][tap, channels].astype(jnp.float32)
            total = total + value.astype(jnp.float32) * weight[None, :]
        return jax.nn.silu(total)


def _kernel(inputs, outputs, *, layout: Layout, gated: bool, blocks: BlockSizes, interpret: bool):
    if "oldest" in inputs:
        inputs, outputs = _at_places(inputs, outputs)
    num_queries, channels = outputs["y"].shape
    num_grown = inputs["mask"].shape[0] - num_queries  # queries are the last nodes
    head, block = pl.program_id(1), pl.program_id(2)
    num_blocks = layout.head_dim // channels
    common = (inputs, outputs, layout, gated, blocks, interpret, num_grown, head)

    @pl.when(block < num_blocks)
    def _():
        first = block * channels
        _scan(_Program(*common, first, *_sections(layout, head, first, channels)))

    @pl.when(block == num_blocks)
    def _():
        _record(_Program(*common, 0, *_sections(layout, head, 0, layout.head_dim)))


def _at_places(inputs, outputs):
    """The refs, those of a queue's records as those of the old record and the new one.

    One program says whose turn it is next.
    """
    num_places = inputs["old x"].shape[0]
    oldest = inputs["oldest"][0]
    free = free_place(oldest, num_places)
    programs = [pl.program_id(axis) for axis in range(3)]

    @pl.when(functools.reduce(jnp.logical_and, [program == 0 for program in programs]))
    def _():
        outputs["oldest"][0] = place_after(oldest, num_places)

    return (
        inputs | {f"old {name}": AtPlace(inputs[f"old {name}"], oldest) for name in _RECORD},
        outputs | {name: AtPlace(outputs[name], free) for name in _RECORD},
    )


def _scan(program: _Program):
    """Convolution, replay and scan of a block of channels; records x, B and dt."""
    inputs, outputs, blocks = program.inputs, program.outputs, program.blocks
    layout, num_grown = program.layout, program.num_grown

    for name in ("x", "B", "C"):
        section = getattr(program, name)
        # C is not recorded, and of the query nodes only.
        first = 0 if name == "C" else num_grown

        def write(query, start, size, name=name, section=section, first=first):
            value = program.convolved(query, section, start, size).astype(outputs[name].dtype)
            outputs[name][first + query, pl.ds(start, size)] = value

        program.for_blocks(program.num_queries, section.size, write)
        if name != "C":
            program.copy_grown(name, 0, section.size)

    num_nodes = inputs["mask"].shape[0]
    node, _ = tb.rows(0, tb.padded_size(num_nodes), num_nodes)
    query = jnp.clip(node - num_grown, 0, program.num_queries - 1)
    raw = inputs["projected"][query, layout.columns[4] + program.head]
    dt = time_step(scaled(raw, layout.multipliers[4]), inputs["dt_bias"][...], layout.dt_limit)
    if num_grown:
        grown = inputs["grown dt"][jnp.minimum(node, num_grown - 1)]
        dt = jnp.where(node < num_grown, grown, dt)
    outputs["dt"][node] = dt

    # What the threads of this program wrote above all of them read below.
    tb.barrier(program.interpret)

    A = -jnp.exp(inputs["A_log"][...])
    parts = [pl.ds(start, blocks.part) for start in range(0, layout.state_size, blocks.part)]
    state = [inputs["ssm"][:, part] for part in parts]
    if "path" in inputs:
        written, decay = along_path(
            *(inputs["old x"], inputs["old dt"], A, inputs["old B"], inputs["path"]),
            block_nodes=blocks.replayed,
            block_state=blocks.part,
        )
        state = [decay * value + new for value, new in zip(state, written, strict=True)]
        for part, value in zip(parts, state, strict=True):
            outputs["ssm"][:, part] = value
    tree = (
        *(outputs["x"], outputs["dt"], A, outputs["B"], outputs["C"]),
        *(inputs["D"][...], inputs["mask"]),
    )
    write = functools.partial(_write_outputs, program)
    outputs_of_tree(state, tree, write, block_queries=blocks.queries, block_keys=blocks.keys)


def _write_outputs(program: _Program, query, y):
    """Gates and writes the outputs `[q, p]` at some queries, and what their norm needs of them."""
    inputs, outputs, layout = program.inputs, program.outputs, program.layout
    if program.gated:
        column = layout.columns[0] + program.head * layout.head_dim + program.first
        gate = inputs["projected"][query, pl.ds(column, y.shape[1])]
        y = y * jax.nn.silu(scaled(gate, layout.multipliers[0]).astype(jnp.float32))
    if "norm_weight" in inputs:
        row_size = layout.num_heads * layout.head_dim
        outputs["mean_squares"][query] = jnp.sum(y * y, axis=1) / row_size
        y = y * inputs["norm_weight"][...].astype(jnp.float32)[None, :]
    outputs["y"][query, :] = y.astype(outputs["y"].dtype)


def _record(program: _Program):
    """Records what went into the convolution, and the conv state before the root."""
    inputs, outputs = program.inputs, program.outputs

    for section in (program.x, program.B, program.C):

        @pl.when(section.is_first)
        def _(section=section):
            channels = pl.ds(section.channel, section.size)

            def write(query, start, size):
                value = program.projection(query, section, start, size)
                part = pl.ds(section.channel + start, size)
                outputs["conv_input"][program.num_grown + query, part] = value

            program.for_blocks(program.num_queries, section.size, write)
            program.copy_grown("conv_input", section.channel, section.size)
            if "back" in inputs:
                state, old = inputs["conv_state"], inputs["old conv_input"]
                num_before = state.shape[0]
                column, _ = tb.rows(0, tb.padded_size(num_before), num_before)
                row = inputs["back"][column]
                new = old[jnp.clip(row - num_before, 0, old.shape[0] - 1), channels]
                kept = state[jnp.minimum(row, num_before - 1), channels]
                value = jnp.where((row < num_before)[:, None], kept, new.astype(kept.dtype))
                outputs["conv_state"][column, channels] = value


def _sections(layout: Layout, head, start, size: int) -> tuple[_Section, _Section, _Section]:
    """The head's x from channel `start` on, `size` of them; its B, and its C."""
    group = lax.div(head, layout.num_heads // layout.num_groups)
    conv_heads, conv_groups = layout.conv_heads

    def of_heads(count):
        return lax.div(head, layout.num_heads // count) * layout.head_dim + start

    def of_groups(count):
        return lax.div(group, layout.num_groups // count) * layout.state_size

    def first_of(count):
        return lax.rem(head, layout.num_heads // count) == 0

    _, x_column, B_column, C_column, _ = layout.columns
    x_channel, B_channel, C_channel = layout.channels
    _, *multipliers, _ = layout.multipliers
    return (
        _Section(
            x_column + of_heads(layout.x_heads),
            x_channel + of_heads(conv_heads),
            size,
            multipliers[0],
            first_of(conv_heads),
        ),
        _Section(
            B_column + of_groups(layout.b_groups),
            B_channel + of_groups(conv_groups),
            layout.state_size,
            multipliers[1],
            first_of(conv_groups),
        ),
        _Section(
            C_column + group * layout.state_size,
            C_channel + group * layout.state_size,
            layout.state_size,
            multipliers[2],
            first_of(layout.num_groups),
        ),
    )
