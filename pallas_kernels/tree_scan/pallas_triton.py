"""`tree_scan`, `replay` and `replay_tree_scan` as one Pallas-Triton kernel, in two ways.

For few nodes `tree_scan_layer` is this kernel too, as a recurrence that begins with `convolve`.

Passes: a program handles one row, one head and one block of its channels. It reads its part of the
state once and keeps it in registers. `replay` goes along the path of the previous tree, node by
node, and writes the state once (input and output are one buffer). `tree_scan` writes the outputs
of all query nodes once. `replay_tree_scan` does both.

As a recurrence a program visits the new tree depth first (`walk.visits`). At a branch it keeps the
state in registers: there are `walk.slots` of them. The numbers of a node depend on the nodes above
it alone, to the bit. In closed form a program computes blocks of queries, each with a loop over
blocks of keys, as flash attention does; registers do not grow with the tree. A block is the whole
head, unless its state has more than `BlockSizes.state` numbers. Blocks of channels of one head
compute its scores C_i . B_j again. The recurrence runs up to `MOST_NODES`, beyond them if
`dispatch.wants_bits()`. A replay is a recurrence in both ways, so a state has the same bits.

The gate is read from the projection in place. A norm of each head alone is done where a program
owns the whole head. For a norm over all heads a program writes the part of each row's mean square
that its channels have: the sum needs all programs, and is left to the reader of the
`DeferredRMSNorm`.

Numerics: decays and accumulators are float32; the queries see the new state in float32. The
recurrence multiplies by `triton.multiply_add`, and adds up S in blocks of `BlockSizes.part`. In
closed form products are as `triton.dot` says, and the decay from node to node is a difference of
sums, masked before exp. Outputs are rounded once, after gate and weight; mean squares are not
rounded. Outputs of nodes that do not exist are 0 or, in closed form and of a single node, finite.

Refuses head and state sizes that are not powers of two of at least 16, and states of more than
`MOST_STATE`. Any numbers of nodes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import dispatch, walk
from pallas_kernels import triton as tb
from pallas_kernels.head_blocks import HeadBlocks, channels_of
from pallas_kernels.numerics import DeferredRMSNorm, scaled
from pallas_kernels.rms_norm.pallas_triton import gated_rms_norm
from pallas_kernels.tree_conv1d.begins import blocked, convolve, fits
from pallas_kernels.tree_conv1d.layout import Convolution, Mamba2Layout, Mamba2Pending
from pallas_kernels.tree_scan import head, recurrence
from pallas_kernels.tree_scan.gate import Gate
from pallas_kernels.triton import Ref


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block."""

    queries: int  # nodes of the new tree per block
    keys: int
    state: int  # elements of the state per program: channels of the head times state size
    part: int  # state channels per partial product
    num_warps: int  # Triton's


_USUAL_HEAD = 64 * 128  # elements of its state
# In a trial on an H200 both ways were even for 5 nodes of one row; for 16 the closed form was twice
# as fast.
MOST_NODES = 8


def closed_form_blocks(dtype: DTypeLike, numbers: int) -> BlockSizes:
    """Block sizes on this device, by type and state elements of a head.

    Those of bfloat16 inputs and usual heads are the fastest on an H200 (`benchmarks/results`). On
    sm_80 to sm_89 a `tree_scan` of over 32 nodes spills with them, but not with fewer keys. All
    others were compiled, not timed.
    """
    if tb.dtype_case(dtype) == "float32":  # full products need many registers
        return BlockSizes(queries=16, keys=16, state=32 * 128, part=64, num_warps=8)
    if numbers > _USUAL_HEAD:
        return BlockSizes(queries=32, keys=32, state=128 * 128, part=128, num_warps=8)
    keys = 32 if (dispatch.generation() or 9) < 9 else 64
    return BlockSizes(queries=64, keys=keys, state=32 * 128, part=128, num_warps=4)


# Float32 inputs with larger states spill registers on an H100 with all block sizes that were tried.
# Larger states of other inputs were not tried.
MOST_STATE = {"float32": 128, "bfloat16": 256}


def scan(
    previous: Sequence[jax.Array] | None,
    tree: Sequence[jax.Array] | None,
    *arguments: Any,
    **options: Any,
) -> tuple[Any, jax.Array]:
    """See `api._run`, whose arrays these are; options are those of `_run`."""
    is_recurrence = tree is None or _is_recurrence(tree[0].shape[1])
    y, state, _ = _run(previous, tree, *arguments, is_recurrence=is_recurrence, **options)
    return y, state


def _is_recurrence(num_nodes: int) -> bool:
    return num_nodes <= MOST_NODES or dispatch.wants_bits()


def convolves(convolution: Convolution, num_nodes: int, state: jax.Array) -> bool:
    """Whether one kernel convolves and scans a tree."""
    _, num_heads, head_dim, state_size = state.shape
    dtype = convolution.projected.dtype
    refused = tb.unsupported_state(head_dim, state_size, dtype, MOST_STATE)
    channels = channels_of(0, head_dim, state_size)
    is_cheap = fits(convolution, num_heads * head_dim // channels, channels)
    return not refused and _is_recurrence(num_nodes) and is_cheap


def tree_scan_layer(
    previous: Sequence[jax.Array] | None, tree: Sequence[jax.Array], *arguments: Any, **options: Any
) -> tuple[Any, Mamba2Pending, jax.Array, jax.Array]:
    """See `api.tree_scan_layer`, for a tree that this `convolves`; given are its D and mask."""
    y, state, results = _run(
        previous, tree, *arguments, is_recurrence=True, A_is_log=True, **options
    )
    convolution = arguments[-1]
    conv_state = results.get("conv_state", convolution.conv_state)
    return y, Mamba2Pending(*(results[name] for name in Mamba2Pending._fields)), state, conv_state


@functools.partial(jax.jit, static_argnames=("is_recurrence", "A_is_log", "interpret"))
def _run(
    previous: Sequence[jax.Array] | None,
    tree: Sequence[jax.Array] | None,
    A: jax.Array,
    state: jax.Array,
    gate: Gate | None,
    convolution: Convolution | None = None,
    *,
    is_recurrence: bool,
    A_is_log: bool,
    interpret: bool,
) -> tuple[Any, jax.Array, dict[str, jax.Array]]:
    """The kernel with a previous tree, a new one, or both: outputs, if any, state, all results.

    With a convolution a new tree is D and mask alone.
    """
    name = "tree_scan" if previous is None else "replay_tree_scan"
    batch, num_heads, head_dim, state_size = state.shape
    if is_recurrence:
        # One node and 16 channels at a time. The fastest of nine for 5 nodes, in a trial on an
        # H200. Warps and `part` decide how S is added up, so they depend on nothing else. States
        # of 256 are for 8 warps: with 4, 64 nodes spill.
        warps = 4 if state_size <= 128 else 8
        blocks = BlockSizes(queries=1, keys=1, state=0, part=32, num_warps=warps)
        way = "recurrence" if convolution is None else "layer"
        name = "replay" if tree is None else f"{name}_{way}"
    else:
        some_x = (previous or tree or ())[0]
        blocks = closed_form_blocks(some_x.dtype, head_dim * state_size)
    channels = channels_of(blocks.state, head_dim, state_size)
    num_blocks = head_dim // channels
    layout = None if convolution is None else convolution.layout
    num_groups = layout.num_groups if layout else (previous or tree or ())[2].shape[2]
    part = HeadBlocks(channels, num_heads // num_groups)

    inputs = {"A": part.of(A, "h"), "state": part.of(state, "bhp.")}
    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {}
    if previous is not None:
        x, dt, B, path = previous
        steps = walk.steps(path)
        inputs |= {
            "prev x": part.of(x, "b.hp"),
            "prev dt": part.of(dt, "b.h"),
            "prev B": part.of(B, "b.g."),
            "steps": part.of(steps, "b."),
        }
        outputs["state"] = inputs["state"]
    if tree is not None:
        *nodes, D, mask = tree
        if convolution is None:
            x, dt, B, C = nodes
            inputs |= {
                "x": part.of(x, "b.hp"),
                "dt": part.of(dt, "b.h"),
                "B": part.of(B, "b.g."),
                "C": part.of(C, "b.g."),
            }
        else:
            more = blocked(convolution, part)
            inputs, outputs = inputs | more[0], outputs | more[1]
            x, C = outputs["x"][0], outputs["C"][0]
        inputs["D"] = part.of(D, "hp"[: D.ndim])
        num_nodes, num_queries = x.shape[1], C.shape[1]
        if not is_recurrence:
            inputs["mask"] = part.of(mask, "b..")
        elif num_nodes > 1:
            visits = walk.visits(mask, num_queries)
            inputs["visits"] = part.of(visits, "b.")
        shape = jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype)
        outputs["y"] = part.of(shape, "b.hp")
    static_gate, later_weight = None, None
    if gate is not None:
        inputs["gate"] = tb.blocked(gate.projected, "b..", "bhp")
        row_size = head_dim if gate.norm_per_head else num_heads * head_dim
        static_gate = (gate.start, gate.multiplier, row_size, gate.norm_epsilon)
        if gate.norm_weight is not None:
            of_program = pl.BlockSpec((channels,), lambda b, h, p: (h * num_blocks + p,))
            # A program with a part of a head cannot norm it.
            if gate.norm_per_head and num_blocks > 1:
                later_weight = gate.norm_weight
            else:
                inputs["norm_weight"] = (gate.norm_weight, of_program)
        if gate.defers_norm:
            outputs["mean_squares"] = (
                jax.ShapeDtypeStruct((batch, num_queries, num_heads * num_blocks), jnp.float32),
                pl.BlockSpec((None, num_queries, None), lambda b, h, p: (b, 0, h * num_blocks + p)),
            )
    results = tb.call_by_name(
        functools.partial(
            _kernel,
            blocks=blocks,
            is_recurrence=is_recurrence,
            num_blocks=num_blocks,
            A_is_log=A_is_log,
            gate=static_gate,
            layout=layout,
            interpret=interpret,
        ),
        inputs,
        outputs,
        name=name,
        num_warps=blocks.num_warps,
        interpret=interpret,
        in_one_order=is_recurrence,
        grid=(batch, num_heads, num_blocks),
    )
    state, y = results.get("state", state), results.get("y")
    if gate is not None and gate.defers_norm:
        rows = results["y"].reshape(batch, num_queries, -1)
        return DeferredRMSNorm(rows, results["mean_squares"], gate.norm_epsilon), state, results
    if gate is not None and later_weight is not None:
        rows = results["y"].reshape(batch, num_queries, -1)
        options = dict(norm="gate_then_norm", epsilon=gate.norm_epsilon, num_groups=num_heads)
        rows = gated_rms_norm(rows, None, later_weight, interpret=interpret, **options)
        y = rows.reshape(results["y"].shape)
    return y, state, results


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    blocks: BlockSizes,
    is_recurrence: bool,
    num_blocks: int,
    A_is_log: bool,
    gate: tuple[int, float, int, float] | None,
    layout: Mamba2Layout | None,
    interpret: bool,
) -> None:
    """Refs by name, of one row and one head; p channels of it, one of `num_blocks`.

    inputs: A [], state [p, S]; of a previous tree prev x [O, p], prev dt [O], prev B [O, S] and
    steps [O + 2]; of a new tree x [N, p], dt [N], B [N, S], C [Q, S], D [p] or [], mask [N, N] or,
    for a recurrence of several nodes, visits [N + 2], and perhaps gate [Q, X] and norm_weight [p].
    outputs: state [p, S] after the path; y [Q, p] and perhaps mean_squares [Q].
    With a layout the program convolves x, dt, B and C first, which are outputs; see `convolve`.
    gate: first column, multiplier, and of the norm the size of a row and epsilon.
    """
    if layout is not None:
        place = pl.program_id(1), pl.program_id(2)
        convolve(inputs, outputs, layout, *place, interpret=interpret)
        inputs = inputs | {name: outputs[name] for name in ("x", "dt", "B", "C")}
    state_size = inputs["state"].shape[1]
    parts = tb.parts(state_size, blocks.part)
    A = inputs["A"][...]
    A = -jnp.exp(A) if A_is_log else A

    def replayed() -> recurrence.State:
        state = tuple(inputs["state"][:, part] for part in parts)
        if "steps" not in inputs:
            return state
        state = recurrence.along_path(inputs, A, state, parts=parts, interpret=interpret)
        for part, value in zip(parts, state, strict=True):
            outputs["state"][:, part] = value
        return state

    if "x" not in inputs:
        replayed()
        return
    # Where two grids share a kernel, jax may mix up `pl.num_programs` (#40847): the number is
    # static. The interpreter knows no program numbers inside of loops.
    block = pl.program_id(1) * num_blocks + pl.program_id(2)
    num_nodes, channels = inputs["x"].shape
    multiply_add = functools.partial(tb.multiply_add, interpret=interpret)

    def gate_at(query: jax.Array) -> jax.Array | None:
        """The gate's columns `[p]` or, of several queries, `[q, p]`, if there is a gate."""
        if gate is None:
            return None
        return inputs["gate"][query, pl.ds(gate[0] + block * channels, channels)]

    def write(query: jax.Array, x: jax.Array, z: jax.Array | None, y: jax.Array) -> None:
        """Adds the skip, gates and writes outputs `[p]` or, of several queries, `[q, p]`."""
        D = lax.broadcast_to_rank(inputs["D"][...], y.ndim)
        y = multiply_add(D, x.astype(jnp.float32), y)
        if gate is not None and z is not None:
            _, multiplier, row_size, epsilon = gate
            y = y * jax.nn.silu(scaled(z, multiplier).astype(jnp.float32))
            if "norm_weight" in inputs:
                mean_square = jnp.sum(multiply_add(y, y), axis=-1) / row_size
                if "mean_squares" in outputs:
                    outputs["mean_squares"][query] = mean_square
                else:  # the program has the whole row
                    y = y * lax.rsqrt(mean_square + epsilon)[..., None]
                weight = inputs["norm_weight"][...].astype(jnp.float32)
                y = y * lax.broadcast_to_rank(weight, y.ndim)
        outputs["y"][query, :] = y.astype(outputs["y"].dtype)

    def leave_out(query: jax.Array) -> None:
        for name in outputs.keys() & {"y", "mean_squares"}:
            ref = outputs[name]
            ref[query] = jnp.zeros(ref.shape[1:], ref.dtype)

    if is_recurrence:
        recurrence.scan_tree(
            *(inputs, A, replayed, gate_at, write, leave_out), parts=parts, interpret=interpret
        )
        return

    def write_block(query: jax.Array, y: jax.Array) -> None:
        node = num_nodes - outputs["y"].shape[0] + query
        write(query, inputs["x"][node, :], gate_at(query), y)

    head.scan_tree(
        *(inputs, A, replayed(), write_block),
        block_queries=blocks.queries,
        block_keys=blocks.keys,
        parts=parts,
    )
