"""`tree_scan`, `replay` and `replay_tree_scan` as one Pallas-Triton kernel.

Passes: a program handles one row, one head and one block of its channels: the whole head, unless
its state has more than `BlockSizes.state` numbers. It reads its part of the state once and keeps it
in registers. `replay` adds the path of the previous tree, whose nodes it reads block by block from
the last to the first, and writes the state once (input and output are one buffer). `tree_scan`
computes the outputs of all query nodes, block by block, each with a loop over blocks of keys, as
flash attention does, and writes them once; registers do not grow with the tree. `replay_tree_scan`
does both. Blocks of channels of one head compute its
scores C_i . B_j again.

The gate is read from the projection in place. A norm of each head alone is done where a program
owns the whole head. For a norm over all heads a program writes the part of each row's mean square
that its channels have: the sum needs all programs, and is left to the reader of the
`DeferredRMSNorm`.

Numerics: decays and accumulators are float32; products as `triton.dot` says; the queries see the
new state in float32. The decay from a node to the end of the path is summed directly, never as a
difference of sums; the decay from node to node is such a difference. Masked before exp. Outputs are
rounded once, after gate and weight; mean squares are not rounded.

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

from pallas_kernels import triton as tb
from pallas_kernels.numerics import DeferredRMSNorm, rms_norm, scaled
from pallas_kernels.tree_scan.gate import Gate
from pallas_kernels.tree_scan.head import along_path, scan_tree
from pallas_kernels.tree_scan.head_blocks import HeadBlocks, channels_of
from pallas_kernels.triton import Ref


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block."""

    replayed: int  # nodes of the previous tree per block
    queries: int  # nodes of the new tree per block
    keys: int
    state: int  # elements of the state per program: channels of the head times state size
    part: int  # state channels per partial product
    num_warps: int  # Triton's
    num_stages: int


# By type of the inputs. The first are the fastest on an H200 (`benchmarks/results`); for over 32
# nodes and states of 128 they spill on sm_80 to sm_89. The others were not timed; states of 256
# spill on sm_90 for few nodes. Full float32 products need many registers.
LARGE_HEAD = "bfloat16, large heads"
_USUAL_HEAD = 64 * 128  # elements of its state
DEFAULTS = {
    "bfloat16": BlockSizes(
        replayed=64, queries=64, keys=64, state=32 * 128, part=128, num_warps=4, num_stages=1
    ),
    LARGE_HEAD: BlockSizes(
        replayed=16, queries=32, keys=32, state=128 * 128, part=128, num_warps=8, num_stages=1
    ),
    "float32": BlockSizes(
        replayed=16, queries=16, keys=16, state=32 * 128, part=64, num_warps=8, num_stages=1
    ),
}


def case(dtype: DTypeLike, numbers: int) -> str:
    """The case of `DEFAULTS` for inputs of this type and heads with this many state elements."""
    name = tb.dtype_case(dtype)
    return LARGE_HEAD if name == "bfloat16" and numbers > _USUAL_HEAD else name


# Float32 inputs with larger states spill registers on an H100 with all block sizes that were tried.
# Larger states of other inputs were not tried.
MOST_STATE = {"float32": 128, "bfloat16": 256}


def unsupported(head_dim: int, state_size: int, dtype: DTypeLike) -> str | None:
    """Why these shapes cannot run, or None."""
    return tb.unsupported_state(head_dim, state_size, dtype, MOST_STATE)


def tree_scan(*arguments: Any, **options: Any) -> jax.Array | DeferredRMSNorm:
    """See `api.tree_scan`, whose arrays and gate these are; options are those of `_run`."""
    x, dt, A, B, C, D, state, mask, *gate = arguments
    return _run("tree_scan", A, state, None, (x, dt, B, C, D, mask), *gate, **options)[0]


def replay(*arguments: jax.Array, **options: Any) -> jax.Array:
    """See `api.replay`."""
    x, dt, A, B, state, path = arguments
    return _run("replay", A, state, (x, dt, B, path), **options)[1]


def replay_tree_scan(
    *arguments: Any, **options: Any
) -> tuple[jax.Array | DeferredRMSNorm, jax.Array]:
    """See `api.replay_tree_scan`, whose arrays and gate these are; options are those of `_run`."""
    previous, (x, dt, A, B, C, D, state, mask, *gate) = arguments[:4], arguments[4:]
    return _run("replay_tree_scan", A, state, previous, (x, dt, B, C, D, mask), *gate, **options)


@functools.partial(jax.jit, static_argnames=("name", "A_is_log", "interpret", "blocks"))
def _run(
    name: str,
    A: jax.Array,
    state: jax.Array,
    previous: Sequence[jax.Array] | None = None,
    tree: Sequence[jax.Array] | None = None,
    gate: Gate | None = None,
    *,
    A_is_log: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[Any, jax.Array]:
    """The kernel with a previous tree, a new one, or both: the outputs, if any, and the state.

    `previous` is x, dt, B and path; `tree` is x, dt, B, C, D and mask; `blocks` None: `DEFAULTS`.
    """
    some_x, _, some_B, *_ = previous or tree or ()
    batch, num_heads, head_dim, state_size = state.shape
    of_case = case(some_x.dtype, head_dim * state_size)
    blocks = blocks or DEFAULTS[of_case]
    channels = channels_of(blocks.state, head_dim, state_size)
    num_blocks = head_dim // channels
    part = HeadBlocks(channels, state_size, num_heads // some_B.shape[2])

    inputs = {"A": (A, part.one_of_heads), "state": (state, part.state)}
    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {}
    if previous is not None:
        x, dt, B, path = previous
        length = x.shape[1]
        inputs |= {
            "prev x": (x, part.of_channels(length)),
            "prev dt": (dt, part.of_head(length)),
            "prev B": (B, part.of_group(length)),
            "path": (path, part.of_row(path)),
        }
        outputs["state"] = inputs["state"]
    if tree is not None:
        x, dt, B, C, D, mask = tree
        num_nodes, num_queries = x.shape[1], C.shape[1]
        inputs |= {
            "x": (x, part.of_channels(num_nodes)),
            "dt": (dt, part.of_head(num_nodes)),
            "B": (B, part.of_group(num_nodes)),
            "C": (C, part.of_group(num_queries)),
            "D": (D, part.one_of_heads if D.ndim == 1 else part.skip),
            "mask": (mask, part.of_row(mask)),
        }
        shape = jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype)
        outputs["y"] = (shape, part.of_channels(num_queries))
    if gate is not None:
        inputs["gate"] = (gate.projected, part.of_row(gate.projected))
    per_head = gate is not None and gate.norm_per_head
    # A program with a part of a head cannot norm it.
    norms = not per_head or num_blocks == 1
    if gate is not None and gate.norm_weight is not None and norms:
        of_program = pl.BlockSpec((channels,), lambda b, h, p: (h * num_blocks + p,))
        inputs["norm_weight"] = (gate.norm_weight, of_program)
    if gate is not None and gate.defers_norm:
        outputs["mean_squares"] = (
            jax.ShapeDtypeStruct((batch, num_queries, num_heads * num_blocks), jnp.float32),
            pl.BlockSpec((None, num_queries, None), lambda b, h, p: (b, 0, h * num_blocks + p)),
        )
    static_gate = None
    if gate is not None:
        row_size = head_dim if per_head else num_heads * head_dim
        static_gate = (gate.start, gate.multiplier, row_size, gate.norm_epsilon)
    results = tb.call_by_name(
        functools.partial(_kernel, blocks=blocks, A_is_log=A_is_log, gate=static_gate),
        inputs,
        outputs,
        in_place={"state": "state"} if previous is not None else {},
        name=name,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, num_blocks),
    )
    state = results.get("state", state)
    y = results.get("y")
    if gate is not None and gate.defers_norm:
        rows = results["y"].reshape(batch, num_queries, -1)
        return DeferredRMSNorm(rows, results["mean_squares"], gate.norm_epsilon), state
    if gate is not None and gate.norm_weight is not None and not norms:
        y = rms_norm(results["y"], gate.norm_weight.reshape(num_heads, -1), gate.norm_epsilon)
    return y, state


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    blocks: BlockSizes,
    A_is_log: bool,
    gate: tuple[int, float, int, float] | None,
) -> None:
    """Refs by name, of one row and one head; p channels of it.

    inputs: A [], state [p, S]; of a previous tree prev x [O, p], prev dt [O], prev B [O, S] and
    path [O]; of a new tree x [N, p], dt [N], B [N, S], C [Q, S], D [p] or [], mask [N, N], and
    perhaps gate [Q, X] and norm_weight [p].
    outputs: state [p, S] after the path; y [Q, p] and perhaps mean_squares [Q].
    gate: first column, multiplier, and of the norm the size of a row and epsilon.
    """
    state_size = inputs["state"].shape[1]
    size = min(blocks.part, state_size)
    parts = [pl.Slice(start, size) for start in range(0, state_size, size)]
    A = inputs["A"][...]
    A = -jnp.exp(A) if A_is_log else A
    if "path" not in inputs:
        state = [inputs["state"][:, part] for part in parts]
    else:
        previous = (inputs["prev x"], inputs["prev dt"], A, inputs["prev B"], inputs["path"])
        written, decay = along_path(*previous, block_nodes=blocks.replayed, parts=parts)
        state = [
            decay * inputs["state"][:, part] + new for part, new in zip(parts, written, strict=True)
        ]
        for part, value in zip(parts, state, strict=True):
            outputs["state"][:, part] = value
    if "x" in inputs:
        # The interpreter knows no program numbers inside of loops.
        block = pl.program_id(1) * pl.num_programs(2) + pl.program_id(2)
        write = functools.partial(_write, inputs, outputs, block, gate=gate)
        scan_tree(
            *(inputs["x"], inputs["dt"], A, inputs["B"], inputs["C"], inputs["mask"]),
            *(state, write),
            block_queries=blocks.queries,
            block_keys=blocks.keys,
            parts=parts,
        )


def _write(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    block: jax.Array,  # []
    query: jax.Array,  # [q]
    y: jax.Array,  # [q, p]
    *,
    gate: tuple[int, float, int, float] | None,
) -> None:
    """Adds the skip, gates and writes the outputs at some queries; `block` of all channels."""
    num_queries, channels = outputs["y"].shape
    first_query = inputs["x"].shape[0] - num_queries
    x = inputs["x"][first_query + query, :].astype(jnp.float32)
    y = y + lax.broadcast_to_rank(inputs["D"][...], 2) * x
    if gate is not None:
        start, multiplier, row_size, epsilon = gate
        z = inputs["gate"][query, pl.ds(start + block * channels, channels)]
        y = y * jax.nn.silu(scaled(z, multiplier).astype(jnp.float32))
        if "norm_weight" in inputs:
            mean_square = jnp.sum(y * y, axis=1) / row_size
            if "mean_squares" in outputs:
                outputs["mean_squares"][query] = mean_square
            else:  # the program has the whole row
                y = y * lax.rsqrt(mean_square + epsilon)[:, None]
            y = y * inputs["norm_weight"][...].astype(jnp.float32)[None, :]
    outputs["y"][query, :] = y.astype(outputs["y"].dtype)
