"""`mamba2_tree` as one Pallas-Triton kernel that updates the state in place.

Passes: a program handles one row, one head and one block of its channels. First it convolves its x,
B and C, straight from the projection and the inputs before, and writes them into the tree's record;
from there, which is the L1 cache mostly, it then does what `replay_tree_scan` does, with the state
read once and written once. All heads of a group convolve its B and C, and write the same numbers to
the same place: loads and arithmetic for launches.

Each tap's row is looked up in one table, which depends on the trees alone and so is made once for
all layers: rows of the old conv state, the previous tree, the grown nodes and the query nodes.

Numerics: those of `tree_conv1d`, `replay` and `tree_scan`, whose code this is in part. What the
convolution gives is rounded to the type of the inputs, as it is where it is recorded.

Refuses head and state sizes that are not powers of two, and a convolution of width 1. Any numbers
of nodes.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_backend as tb
from pallas_kernels.mamba2_tree.config import BlockSizes, block_sizes
from pallas_kernels.mamba2_tree.layout import Layout, time_step
from pallas_kernels.numerics import scaled
from pallas_kernels.replay.pallas_triton import along_path
from pallas_kernels.replay.pallas_triton import unsupported as unsupported_state
from pallas_kernels.replay_tree_scan.pallas_triton import outputs_of_tree


def unsupported(layout: Layout, width: int) -> str | None:
    """Why these shapes cannot run, or None."""
    if width == 1:
        return "a convolution of width 1 has no state"
    return unsupported_state(layout.head_dim, layout.state_size)


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
    interpret=False,
    blocks: BlockSizes | None = None,
):
    """See `api.mamba2_tree`; the record is a tuple."""
    blocks = blocks or block_sizes(projected.dtype)
    batch, num_queries, _ = projected.shape
    num_nodes = ancestor_mask.shape[1]
    num_heads, head_dim = layout.num_heads, layout.head_dim
    num_groups, state_size = layout.num_groups, layout.state_size
    heads_per_group = num_heads // num_groups
    channels = min(head_dim, max(tb.SMALLEST_BLOCK, blocks.state // state_size))

    def of_row(array):
        shape = array.shape[1:]
        return pl.BlockSpec((None, *shape), lambda b, h, p: (b,) + (0,) * len(shape))

    def of_all(array):
        return pl.BlockSpec(array.shape, lambda b, h, p: (0,) * array.ndim)

    def of_channels(length):
        return pl.BlockSpec((None, length, None, channels), lambda b, h, p: (b, 0, h, p))

    def of_head(length):
        return pl.BlockSpec((None, length, None), lambda b, h, p: (b, 0, h))

    def of_group(length):
        return pl.BlockSpec(
            (None, length, None, state_size), lambda b, h, p: (b, 0, h // heads_per_group, 0)
        )

    state_block = pl.BlockSpec((None, None, channels, state_size), lambda b, h, p: (b, h, p, 0))
    one_of_heads = pl.BlockSpec((None,), lambda b, h, p: (h,))
    if weights.D.shape[0] == num_heads:
        of_D = one_of_heads
    else:
        of_D = pl.BlockSpec((channels,), lambda b, h, p: (h * (head_dim // channels) + p,))

    inputs = {
        "ssm": (ssm, state_block),
        "projected": (projected, of_row(projected)),
        "conv_state": (conv_state, of_row(conv_state)),
        "conv_weight": (weights.conv_weight, of_all(weights.conv_weight)),
        "dt_bias": (weights.dt_bias, one_of_heads),
        "A_log": (weights.A_log, one_of_heads),
        "D": (weights.D, of_D),
        "mask": (ancestor_mask, of_row(ancestor_mask)),
    }
    if weights.conv_bias is not None:
        inputs["conv_bias"] = (weights.conv_bias, of_all(weights.conv_bias))
    num_replayed = 0
    sources = window
    if previous is not None:
        old, path, back = previous
        num_replayed = path.shape[1]
        sources = rows_before(window, back, num_replayed)
        inputs |= {
            "old x": (old.x, of_channels(num_replayed)),
            "old dt": (old.dt, of_head(num_replayed)),
            "old B": (old.B, of_group(num_replayed)),
            "old conv_input": (old.conv_input, of_row(old.conv_input)),
            "path": (path, of_row(path)),
            "back": (back, of_row(back)),
        }
    inputs["sources"] = (sources, of_row(sources))
    if grown is not None:
        num_grown = grown.x.shape[1]
        inputs |= {
            "grown x": (grown.x, of_channels(num_grown)),
            "grown dt": (grown.dt, of_head(num_grown)),
            "grown B": (grown.B, of_group(num_grown)),
            "grown conv_input": (grown.conv_input, of_row(grown.conv_input)),
        }

    def like(*shape, dtype=projected.dtype):
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    conv_input = like(num_nodes, layout.num_channels)
    outputs = {
        "y": (like(num_queries, num_heads, head_dim), of_channels(num_queries)),
        "x": (like(num_nodes, num_heads, head_dim), of_channels(num_nodes)),
        "dt": (like(num_nodes, num_heads, dtype=jnp.float32), of_head(num_nodes)),
        "B": (like(num_nodes, num_groups, state_size), of_group(num_nodes)),
        "conv_input": (conv_input, of_row(conv_input)),
        # For this program itself.
        "C": (like(num_queries, num_groups, state_size), of_group(num_queries)),
    }
    aliases = {}
    if previous is not None:
        outputs |= {
            "ssm": (ssm, state_block),
            "conv_state": (conv_state, of_row(conv_state)),
        }
        # Jax flattens dicts in the order of their keys.
        aliases = {sorted(inputs).index("ssm"): sorted(outputs).index("ssm")}
    results = tb.call(
        functools.partial(
            _kernel,
            layout=layout,
            blocks=dataclasses.replace(
                blocks,
                replayed=min(blocks.replayed, tb.padded_size(num_replayed or 1)),
                queries=min(blocks.queries, tb.padded_size(num_queries)),
                keys=min(blocks.keys, tb.padded_size(num_nodes)),
                part=min(blocks.part, state_size),
            ),
            interpret=interpret,
        ),
        name="mamba2_tree",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, head_dim // channels),
        in_specs=[{name: spec for name, (_, spec) in inputs.items()}],
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, (array, _) in outputs.items()
        },
        input_output_aliases=aliases,
    )({name: array for name, (array, _) in inputs.items()})
    record = tuple(results[name] for name in ("x", "dt", "B", "conv_input"))
    return results["y"], record, results.get("ssm", ssm), results.get("conv_state", conv_state)


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
        is_first: whether no other program before has the same channels.
    """

    column: jax.Array
    channel: jax.Array
    size: int
    multiplier: float
    is_first: jax.Array


def _kernel(inputs, outputs, *, layout: Layout, blocks: BlockSizes, interpret: bool):
    ref = inputs.__getitem__
    num_queries, num_channels = outputs["y"].shape
    num_nodes = ref("mask").shape[0]
    num_grown = num_nodes - num_queries  # queries are the last nodes
    head, block = pl.program_id(1), pl.program_id(2)
    sections = dict(zip("xBC", _sections(layout, head, block, num_channels), strict=True))

    def projection(query, section: _Section, start: int, size: int):
        columns = pl.ds(section.column + start, size)
        return scaled(ref("projected")[query, columns], section.multiplier)

    # What the taps read, and the rows of `sources` where each ends.
    before = [
        inputs[name]
        for name in ("conv_state", "old conv_input", "grown conv_input")
        if name in inputs
    ]
    ends = list(itertools.accumulate(array.shape[0] for array in before))

    def convolved(query, section: _Section, start: int, size: int):
        channels = pl.ds(section.channel + start, size)
        total = jnp.zeros((1, size), jnp.float32)
        if "conv_bias" in inputs:
            total = total + ref("conv_bias")[channels].astype(jnp.float32)[None, :]
        for tap in range(ref("conv_weight").shape[0]):
            row = ref("sources")[query, tap]
            value = projection(jnp.clip(row - ends[-1], 0, num_queries - 1), section, start, size)
            for array, end in reversed(list(zip(before, ends, strict=True))):
                length = array.shape[0]
                there = array[jnp.clip(row - (end - length), 0, length - 1), channels]
                value = jnp.where((row < end)[:, None], there.astype(value.dtype), value)
            weight = ref("conv_weight")[tap, channels].astype(jnp.float32)
            total = total + value.astype(jnp.float32) * weight[None, :]
        return jax.nn.silu(total)

    # Convolution and time steps, recorded. Programs that share a group write the same numbers.
    for_blocks = functools.partial(_for_blocks, blocks.queries, num_queries)
    for name, section in sections.items():
        # C is not recorded, and of the query nodes only.
        first = 0 if name == "C" else num_grown
        for start in range(0, section.size, blocks.part):
            size = min(blocks.part, section.size)

            def write(query, name=name, section=section, first=first, start=start, size=size):
                value = convolved(query, section, start, size)
                outputs[name][first + query, pl.ds(start, size)] = value.astype(outputs[name].dtype)

            for_blocks(write)
    node, _ = tb.rows(0, tb.padded_size(num_nodes), num_nodes)
    query = jnp.clip(node - num_grown, 0, num_queries - 1)
    raw = scaled(ref("projected")[query, layout.columns[4] + head], layout.multipliers[4])
    dt = time_step(raw, ref("dt_bias")[...], layout.dt_limit)
    if num_grown:
        grown = ref("grown dt")[jnp.minimum(node, num_grown - 1)]
        dt = jnp.where(node < num_grown, grown, dt)
    outputs["dt"][node] = dt

    def copy_grown(name, start, size):
        def copy(node):
            part = pl.ds(start, size)
            outputs[name][node, part] = ref(f"grown {name}")[node, part]

        if num_grown:
            _for_blocks(blocks.queries, num_grown, copy)

    copy_grown("x", 0, num_channels)
    copy_grown("B", 0, layout.state_size)
    for section in sections.values():

        @pl.when(section.is_first)
        def _(section=section):
            channels = pl.ds(section.channel, section.size)

            def write(query):
                value = projection(query, section, 0, section.size)
                outputs["conv_input"][num_grown + query, channels] = value

            for_blocks(write)
            copy_grown("conv_input", section.channel, section.size)
            if "back" in inputs:
                state, old = before[:2]
                column, _ = tb.rows(0, tb.padded_size(ends[0]), ends[0])
                row = ref("back")[column]
                new = old[jnp.clip(row - ends[0], 0, old.shape[0] - 1), channels]
                kept = state[jnp.minimum(row, ends[0] - 1), channels]
                value = jnp.where((row < ends[0])[:, None], kept, new.astype(kept.dtype))
                outputs["conv_state"][column, channels] = value

    tb.barrier(interpret)  # what the threads of this program wrote above all of them read below

    # The state, replayed, and the outputs.
    A = -jnp.exp(ref("A_log")[...])
    parts = [pl.ds(start, blocks.part) for start in range(0, layout.state_size, blocks.part)]
    state = [ref("ssm")[:, part] for part in parts]
    if "path" in inputs:
        written, decay = along_path(
            *(ref("old x"), ref("old dt"), A, ref("old B"), ref("path")),
            block_nodes=blocks.replayed,
            block_state=blocks.part,
        )
        state = [decay * value + new for value, new in zip(state, written, strict=True)]
        for part, value in zip(parts, state, strict=True):
            outputs["ssm"][:, part] = value
    outputs_of_tree(
        state,
        *(outputs["x"], outputs["dt"], A, outputs["B"], outputs["C"], ref("D")[...], ref("mask")),
        outputs["y"],
        block_queries=blocks.queries,
        block_keys=blocks.keys,
    )


def _for_blocks(size: int, limit: int, body):
    """Calls `body` with the rows of one block of `limit` after the other."""

    def step(i, _):
        rows, _ = tb.rows(i * size, size, limit)
        body(rows)

    lax.fori_loop(0, pl.cdiv(limit, size), step, None)


def _sections(layout: Layout, head, block, num_channels: int):
    """x, B and C of a block of a head's channels."""
    P, S = layout.head_dim, layout.state_size
    group = lax.div(head, layout.num_heads // layout.num_groups)
    conv_heads, conv_groups = layout.conv_heads
    first_of_group = lax.rem(head, layout.num_heads // layout.num_groups) == 0

    def of_heads(count):
        return lax.div(head, layout.num_heads // count) * P + block * num_channels

    def of_groups(count):
        return lax.div(group, layout.num_groups // count) * S

    def first(repeats):
        return lax.rem(head, repeats) == 0

    _, x_column, B_column, C_column, _ = layout.columns
    x_channel, B_channel, C_channel = layout.channels
    _, *multipliers, _ = layout.multipliers
    return (
        _Section(
            x_column + of_heads(layout.x_heads),
            x_channel + of_heads(conv_heads),
            num_channels,
            multipliers[0],
            first(layout.num_heads // conv_heads),
        ),
        _Section(
            B_column + of_groups(layout.b_groups),
            B_channel + of_groups(conv_groups),
            S,
            multipliers[1],
            (block == 0) & first(layout.num_heads // conv_groups),
        ),
        _Section(
            C_column + group * S,
            C_channel + group * S,
            S,
            multipliers[2],
            (block == 0) & first_of_group,
        ),
    )
