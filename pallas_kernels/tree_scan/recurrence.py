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
from jax import lax
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
    decay = jnp.exp(multiply_add(dt, A, None))[:, None]
    written = multiply_add(x.astype(jnp.float32), dt, None)[:, None]
    columns = [column.astype(jnp.float32)[None, :] for column in B]
    return tuple(
        multiply_add(value, decay, multiply_add(written, column, None))
        for value, column in zip(state, columns, strict=True)
    )


def along_path(
    x_ref: Ref,  # [O, p]
    dt_ref: Ref,  # [O]
    A: jax.Array,  # []
    B_ref: Ref,  # [O, S]
    steps_ref: Ref,  # [O + 2], see `walk.steps`
    state: State,
    *,
    parts: Sequence[pl.Slice],
    interpret: bool,
) -> State:
    """The state after a path."""

    def load(step: int | jax.Array) -> tuple[Any, ...]:
        node = steps_ref[1 + step]
        return x_ref[node, :], dt_ref[node], tuple(B_ref[node, part] for part in parts)

    def advance(step: jax.Array, carry: Any) -> Any:
        state, (x, dt, B) = carry
        following = load(step + 1)
        return _advanced(state, x, dt, A, B, interpret=interpret), following

    return lax.fori_loop(0, steps_ref[0], advance, (state, load(0)))[0]


def scan_tree(
    x_ref: Ref,  # [N, p]
    dt_ref: Ref,  # [N]
    A: jax.Array,  # []
    B_ref: Ref,  # [N, S]
    C_ref: Ref,  # [Q, S]
    visits_ref: Ref | None,  # [N + 2], see `walk.visits`; None: the only node
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
    num_nodes, num_queries = x_ref.shape[0], C_ref.shape[0]
    first_query = num_nodes - num_queries  # queries are the last nodes
    multiply_add = functools.partial(tb.multiply_add, interpret=interpret)

    def load(node: jax.Array) -> tuple[Any, ...]:
        query = jnp.maximum(node - first_query, 0)
        B, C = ([ref[at, part] for part in parts] for ref, at in ((B_ref, node), (C_ref, query)))
        return x_ref[node, :], dt_ref[node], tuple(B), tuple(C), gate_at(query)

    def if_query(node: jax.Array) -> Callable[[Callable[[jax.Array], None]], None]:
        """Runs a function of the query that a node is."""
        if not first_query:
            return lambda function: function(node)
        return lambda function: pl.when(node >= first_query)(lambda: function(node - first_query))

    def visited(state: State, node: jax.Array, inputs: tuple[Any, ...]) -> State:
        """The state after a node, whose outputs are written if it is a query."""
        x, dt, B, C, gate = inputs
        state = _advanced(state, x, dt, A, B, interpret=interpret)

        @if_query(node)
        def _(query: jax.Array) -> None:
            total: Any = None
            for value, column in zip(state, C, strict=True):
                total = multiply_add(value, column.astype(jnp.float32)[None, :], total)
            write(query, x, gate, jnp.sum(total, axis=1))

        return state

    def leave_out_query(node: jax.Array) -> None:
        if_query(node)(leave_out)

    walk.visit_all(visits_ref, num_nodes, replayed, load, visited, leave_out_query)
