"""The replay and the scan of one kernel program, from node to node: some channels of one head.

The state is a tuple of blocks `[p, s]` in registers, because Triton cannot slice `[p, S]`. Products
are those of `triton.multiply_add`, so a node's numbers depend on the nodes above it and on nothing
else. While a node is computed, the inputs of the next one are loaded.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels import walk
from pallas_kernels.triton import Ref

State = walk.State  # [p, s] each


def _advanced(
    state: State,
    x: jax.Array,  # [p]
    dt: jax.Array,  # []
    A: jax.Array,  # []
    B: Sequence[jax.Array],  # [s] each
    *,
    interpret: bool,
) -> State:
    """The state after one more node, `exp(dt A) state + (dt x) outer B`."""
    multiply_add = functools.partial(tb.multiply_add, interpret=interpret)
    dt, A = dt[None], A[None]  # instructions of our own are for blocks
    decay = jnp.exp(multiply_add(dt, A))[:, None]
    written = multiply_add(x.astype(jnp.float32), dt)[:, None]
    columns = [column.astype(jnp.float32)[None, :] for column in B]
    return tuple(
        multiply_add(value, decay, multiply_add(written, column))
        for value, column in zip(state, columns, strict=True)
    )


def along_path(
    inputs: dict[str, Ref],  # prev x [O, p], prev dt [O], prev B [O, S], steps [O + 2]
    A: jax.Array,  # []
    state: State,
    *,
    parts: Sequence[pl.Slice],
    interpret: bool,
) -> State:
    """The state after a path."""

    def load(node: jax.Array) -> tuple[Any, ...]:
        B = [inputs["prev B"][node, part] for part in parts]
        return inputs["prev x"][node, :], inputs["prev dt"][node], B

    def advance(state: State, x: jax.Array, dt: jax.Array, B: Sequence[jax.Array]) -> State:
        return _advanced(state, x, dt, A, B, interpret=interpret)

    return walk.along(inputs["steps"], load, advance, state)


def scan_tree(
    inputs: dict[str, Ref],  # x [N, p], dt [N], B [N, S], C [Q, S], visits [N + 2] or none
    A: jax.Array,  # []
    replayed: Callable[[], State],
    gate_at: Callable[[jax.Array], jax.Array | None],
    write: Callable[..., None],
    leave_out: Callable[[jax.Array], None],
    *,
    parts: Sequence[pl.Slice],
    interpret: bool,
) -> None:
    """Calls `write` with each query that is visited, its x, gate and output `[p]`, no skip.

    `replayed` gives the state before the root: the first node's inputs are loaded before it runs.
    `leave_out` is called with the queries that are not visited.
    """
    num_nodes = inputs["x"].shape[0]
    first_query = num_nodes - inputs["C"].shape[0]  # queries are the last nodes

    def load(node: jax.Array, query: jax.Array) -> tuple[Any, ...]:
        B = [inputs["B"][node, part] for part in parts]
        C = [inputs["C"][query, part] for part in parts]
        return inputs["x"][node, :], inputs["dt"][node], B, C, gate_at(query)

    def visited(state: State, node: jax.Array, now: tuple[Any, ...]) -> tuple[State, tuple]:
        x, dt, B, C, gate = now
        return _advanced(state, x, dt, A, B, interpret=interpret), (x, C, gate)

    def write_query(query: jax.Array, state: State, x: jax.Array, C: Any, gate: Any) -> None:
        total: Any = None
        for value, column in zip(state, C, strict=True):
            row = column.astype(jnp.float32)[None, :]
            total = tb.multiply_add(value, row, total, interpret=interpret)
        write(query, x, gate, jnp.sum(total, axis=1))

    nodes = (inputs.get("visits"), num_nodes, first_query)
    walk.visit_all(*nodes, replayed, load, visited, write_query, leave_out)
