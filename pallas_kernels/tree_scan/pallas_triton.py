"""`tree_scan`, `replay` and `replay_tree_scan` as one Pallas-Triton kernel.

Passes: a program handles one row, one head and one block of its channels: the whole head, unless
its state has more than `BlockSizes.state` numbers. It reads its part of the state once and keeps it
in registers. `replay` adds the path of the previous tree, whose nodes it reads block by block from
the last to the first, and writes the state once (input and output are one buffer). `tree_scan`
computes the outputs of all query nodes, block by block, each with a loop over blocks of keys, as
flash attention does, and writes them once; from node to node only a tile of the mask, block by N,
grows with the tree. `replay_tree_scan` does both. Blocks of channels of one head compute its
scores C_i . B_j again.

The gate is read from the projection in place. Of a norm behind the gate a program writes the part
of each row's mean square that its channels have: the sum needs all programs, and is left to the
reader of the `DeferredRMSNorm`.

Numerics: decays and accumulators are float32; products as `triton.dot` says; the queries see the
new state in float32. The decay from a node to the end of the path is summed directly, never as a
difference of sums; the decay from node to node is such a difference. Masked before exp. Outputs are
rounded once, after gate and weight; mean squares are not rounded.

Refuses head and state sizes that are not powers of two of at least 16, and states of more than
`MOST_STATE`. Any numbers of nodes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import triton as tb
from pallas_kernels import tuning
from pallas_kernels.numerics import DeferredRMSNorm, scaled
from pallas_kernels.tree_scan.config import BlockSizes, block_sizes
from pallas_kernels.tree_scan.gate import Gate
from pallas_kernels.tree_scan.head_blocks import HeadBlocks, channels_of

Ref = Any

# Float32 inputs with larger states spill registers on an H100 with all block sizes that were tried.
# Larger states of other inputs were not tried.
MOST_STATE = {"float32": 128, "bfloat16": 256}


def unsupported(head_dim: int, state_size: int, dtype: DTypeLike) -> str | None:
    """Why these shapes cannot run, or None."""
    case = tuning.dtype_case(dtype)
    if state_size > MOST_STATE[case]:
        return f"state_size = {state_size} of {case} inputs is more than {MOST_STATE[case]}"
    return tb.unsupported_size("head_dim", head_dim) or tb.unsupported_size(
        "state_size", state_size
    )


_STATIC = ("A_is_log", "interpret", "blocks")


@functools.partial(jax.jit, static_argnames=_STATIC)
def tree_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    state: jax.Array,
    mask: jax.Array,
    gate: Gate | None = None,
    *,
    A_is_log: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array | DeferredRMSNorm:
    """See `api.tree_scan`."""
    tree = (x, dt, B, C, D, mask)
    return _run(
        "tree_scan",
        *(A, state),
        tree=tree,
        gate=gate,
        A_is_log=A_is_log,
        interpret=interpret,
        blocks=blocks,
    )[0]


@functools.partial(jax.jit, static_argnames=("interpret", "blocks"))
def replay(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    state: jax.Array,
    path: jax.Array,
    *,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See `api.replay`."""
    previous = (x, dt, B, path)
    return _run("replay", A, state, previous=previous, interpret=interpret, blocks=blocks)[1]


@functools.partial(jax.jit, static_argnames=_STATIC)
def replay_tree_scan(
    prev_x: jax.Array,
    prev_dt: jax.Array,
    prev_B: jax.Array,
    prev_path: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    state: jax.Array,
    ancestor_mask: jax.Array,
    gate: Gate | None = None,
    *,
    A_is_log: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[jax.Array | DeferredRMSNorm, jax.Array]:
    """See `api.replay_tree_scan`."""
    return _run(
        "replay_tree_scan",
        *(A, state),
        previous=(prev_x, prev_dt, prev_B, prev_path),
        tree=(x, dt, B, C, D, ancestor_mask),
        gate=gate,
        A_is_log=A_is_log,
        interpret=interpret,
        blocks=blocks,
    )


def _run(
    name: str,
    A: jax.Array,
    state: jax.Array,
    *,
    previous: tuple[jax.Array, ...] | None = None,
    tree: tuple[jax.Array, ...] | None = None,
    gate: Gate | None = None,
    A_is_log: bool = False,
    interpret: bool,
    blocks: BlockSizes | None,
) -> tuple[Any, jax.Array]:
    """The kernel with a previous tree, a new one, or both.

    Args:
        name: of the kernel.
        A, state, gate, A_is_log, interpret, blocks: as elsewhere.
        previous: x, dt, B and path of the previous tree.
        tree: x, dt, B, C, D and mask of the new tree.

    Returns:
        The outputs, if there is a new tree, and the state.
    """
    some_x, _, some_B, *_ = previous or tree or ()
    blocks = blocks or block_sizes(some_x.dtype)
    batch, num_heads, head_dim, state_size = state.shape
    channels = channels_of(blocks.state, head_dim, state_size)
    num_blocks = head_dim // channels
    part = HeadBlocks(channels, state_size, num_heads // some_B.shape[2])

    def of_row(array: jax.Array) -> pl.BlockSpec:
        shape = array.shape[1:]
        return pl.BlockSpec((None, *shape), lambda b, h, p: (b,) + (0,) * len(shape))

    inputs = {"A": (A, part.one_of_heads), "state": (state, part.state)}
    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {}
    if previous is not None:
        x, dt, B, path = previous
        length = x.shape[1]
        inputs |= {
            "prev x": (x, part.of_channels(length)),
            "prev dt": (dt, part.of_head(length)),
            "prev B": (B, part.of_group(length)),
            "path": (path, of_row(path)),
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
            "mask": (mask, of_row(mask)),
        }
        shape = jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype)
        outputs["y"] = (shape, part.of_channels(num_queries))
    if gate is not None:
        inputs["gate"] = (gate.projected, of_row(gate.projected))
    if gate is not None and gate.norm_weight is not None:
        of_program = pl.BlockSpec((channels,), lambda b, h, p: (h * num_blocks + p,))
        inputs["norm_weight"] = (gate.norm_weight, of_program)
        outputs["mean_squares"] = (
            jax.ShapeDtypeStruct((batch, num_queries, num_heads * num_blocks), jnp.float32),
            pl.BlockSpec((None, num_queries, None), lambda b, h, p: (b, 0, h * num_blocks + p)),
        )
    static_gate = None
    if gate is not None:
        static_gate = (gate.start, gate.multiplier, num_heads * head_dim)
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
    if gate is not None and gate.norm_weight is not None:
        rows = results["y"].reshape(batch, num_queries, -1)
        return DeferredRMSNorm(rows, results["mean_squares"], gate.norm_epsilon), state
    return results.get("y"), state


def _kernel(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    blocks: BlockSizes,
    A_is_log: bool,
    gate: tuple[int, float, int] | None,
) -> None:
    """Refs by name, of one row and one head; p channels of it.

    inputs: A [], state [p, S]; of a previous tree prev x [O, p], prev dt [O], prev B [O, S] and
    path [O]; of a new tree x [N, p], dt [N], B [N, S], C [Q, S], D [p] or [], mask [N, N], and
    perhaps gate [Q, X] and norm_weight [p].
    outputs: state [p, S] after the path; y [Q, p] and perhaps mean_squares [Q].
    gate: first column, multiplier, and size of a normed row.
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
        tree = Tree(
            *(inputs["x"], inputs["dt"], inputs["B"], inputs["C"], inputs["mask"]), A=A, parts=parts
        )
        # The interpreter knows no program numbers inside of loops.
        block = pl.program_id(1) * pl.num_programs(2) + pl.program_id(2)
        write = functools.partial(_write, inputs, outputs, block, gate=gate)
        tree.scan(state, write, block_queries=blocks.queries, block_keys=blocks.keys)


def _write(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    block: jax.Array,  # []
    query: jax.Array,  # [q]
    y: jax.Array,  # [q, p]
    *,
    gate: tuple[int, float, int] | None,
) -> None:
    """Adds the skip, gates and writes the outputs at some queries; `block` of all channels."""
    num_queries, channels = outputs["y"].shape
    first_query = inputs["x"].shape[0] - num_queries
    y = y + inputs["D"][...] * inputs["x"][first_query + query, :].astype(jnp.float32)
    if gate is not None:
        start, multiplier, row_size = gate
        z = inputs["gate"][query, pl.ds(start + block * channels, channels)]
        y = y * jax.nn.silu(scaled(z, multiplier).astype(jnp.float32))
        if "norm_weight" in inputs:
            outputs["mean_squares"][query] = jnp.sum(y * y, axis=1) / row_size
            y = y * inputs["norm_weight"][...].astype(jnp.float32)[None, :]
    outputs["y"][query, :] = y.astype(outputs["y"].dtype)


def along_path(
    x_ref: Ref,  # [N, p]
    dt_ref: Ref,  # [N]
    A: jax.Array,  # []
    B_ref: Ref,  # [N, S]
    path_ref: Ref,  # [N]
    *,
    block_nodes: int,
    parts: Sequence[pl.Slice],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """What the nodes of a path write, and the factor by which the state before decays.

    What is written comes as parts `[p, s]`, because Triton cannot slice `[p, S]`.
    """
    num_nodes, channels = x_ref.shape
    block_nodes = min(block_nodes, tb.padded_size(num_nodes))
    num_blocks = pl.cdiv(num_nodes, block_nodes)
    node = lax.broadcasted_iota(jnp.int32, (block_nodes, block_nodes), 0)
    other = lax.broadcasted_iota(jnp.int32, (block_nodes, block_nodes), 1)

    def from_block(i, carry):
        written, after_block = carry
        here, exists = tb.rows((num_blocks - 1 - i) * block_nodes, block_nodes, num_nodes)
        dt = jnp.where(path_ref[here] & exists, dt_ref[here], 0.0)
        log_decay = dt * A
        after = after_block + jnp.sum(jnp.where(other > node, log_decay[None, :], 0.0), axis=1)
        weight = jnp.exp(after) * dt  # zero off the path
        weighted = x_ref[here, :].astype(jnp.float32) * weight[:, None]
        written = tuple(
            total + tb.dot(weighted, B_ref[here, part], trans_a=True)
            for part, total in zip(parts, written, strict=True)
        )
        return written, after_block + jnp.sum(log_decay)

    nothing = tuple(jnp.zeros((channels, part.size), jnp.float32) for part in parts)
    written, total = lax.fori_loop(0, num_blocks, from_block, (nothing, jnp.float32(0.0)))
    return written, jnp.exp(total)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A new tree, as the program of one head sees it; refs of x, dt, B, C and mask.

    Attributes:
        A: of the head.
        parts: slices of the state channels.
    """

    x: Ref  # [N, p]
    dt: Ref  # [N]
    B: Ref  # [N, S]
    C: Ref  # [Q, S]
    mask: Ref  # [N, N]
    A: jax.Array  # []
    parts: Sequence[pl.Slice]

    def scan(
        self,
        state: Sequence[jax.Array],  # [p, s] each
        write: Callable[[jax.Array, jax.Array], None],
        *,
        block_queries: int,
        block_keys: int,
    ) -> None:
        """Calls `write` with the queries `[q]` of each block and their outputs `[q, p]`."""
        num_nodes, num_queries = self.x.shape[0], self.C.shape[0]
        block_queries = min(block_queries, tb.padded_size(num_queries))
        block_keys = min(block_keys, tb.padded_size(num_nodes))

        def block_of_queries(i, _):
            query, _ = tb.rows(i * block_queries, block_queries, num_queries)
            carried = [
                tb.dot(self.C[query, part], value, trans_b=True)
                for part, value in zip(self.parts, state, strict=True)
            ]
            write(query, self._outputs(i, query, functools.reduce(jnp.add, carried), block_keys))

        lax.fori_loop(0, pl.cdiv(num_queries, block_queries), block_of_queries, None)

    def _outputs(
        self,
        block: jax.Array,  # []
        query: jax.Array,  # [q]
        carried: jax.Array,  # [q, p]
        block_keys: int,
    ) -> jax.Array:
        """Outputs of one block of queries, without skip, from what the state gives before decay."""
        num_nodes, num_queries = self.x.shape[0], self.C.shape[0]
        block_queries = query.shape[0]
        first_query = num_nodes - num_queries  # queries are the last nodes
        node, node_exists = tb.rows(0, tb.padded_size(num_nodes), num_nodes)
        log_decay = jnp.where(node_exists, self.dt[node] * self.A, 0.0)  # of each node alone

        def accumulated(rows):
            path = self.mask[rows[:, None], node[None, :]]
            return jnp.sum(jnp.where(path, log_decay[None, :], 0.0), axis=1)

        query_decay = accumulated(first_query + query)
        y = carried * jnp.exp(query_decay)[:, None]

        # The nodes above each query, one block of keys at a time.
        def from_keys(j, y):
            key, key_exists = tb.rows(j * block_keys, block_keys, num_nodes)
            scores = [
                tb.dot(self.C[query, part], self.B[key, part], trans_b=True) for part in self.parts
            ]
            exponent = query_decay[:, None] - accumulated(key)[None, :]
            above = self.mask[(first_query + query)[:, None], key[None, :]] & key_exists[None, :]
            decay = jnp.exp(jnp.where(above, exponent, -jnp.inf))
            weight = functools.reduce(jnp.add, scores) * decay * self.dt[key][None, :]
            return y + tb.dot(weight, self.x[key, :])

        # Ancestors come before their descendants: later blocks of keys hold none.
        end = jnp.minimum(first_query + (block + 1) * block_queries, num_nodes)
        return lax.fori_loop(0, lax.div(end + block_keys - 1, block_keys), from_keys, y)
