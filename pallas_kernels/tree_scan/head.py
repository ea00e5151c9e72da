"""The scan of one kernel program in closed form: some channels of one head."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.triton import Ref


def scan_tree(
    inputs: dict[str, Ref],  # x [N, p], dt [N], B [N, S], C [Q, S], mask [N, N]
    A: jax.Array,  # []
    state: Sequence[jax.Array],  # [p, s] each
    write: Callable[[jax.Array, jax.Array], None],
    *,
    block_queries: int,
    block_keys: int,
    parts: Sequence[pl.Slice],
) -> None:
    """Calls `write` with the queries `[q]` of each block and their outputs `[q, p]`, no skip."""
    x_ref, dt_ref, B_ref, C_ref, mask_ref = (inputs[x] for x in ("x", "dt", "B", "C", "mask"))
    num_nodes, num_queries = x_ref.shape[0], C_ref.shape[0]
    first_query = num_nodes - num_queries  # queries are the last nodes
    block_queries = min(block_queries, tb.padded_size(num_queries))
    block_keys = min(block_keys, tb.padded_size(num_nodes))

    def time_to(rows: jax.Array) -> jax.Array:
        """The sum of dt along the paths to some nodes, one block of ancestors at a time."""

        def of_block(j: jax.Array, total: jax.Array) -> jax.Array:
            node, exists = tb.rows(j * block_keys, block_keys, num_nodes)
            path = mask_ref[rows[:, None], node[None, :]] & exists[None, :]
            return total + jnp.sum(jnp.where(path, dt_ref[node][None, :], 0.0), axis=1)

        zero = jnp.zeros(rows.shape, jnp.float32)
        return lax.fori_loop(0, pl.cdiv(num_nodes, block_keys), of_block, zero)

    def block_of_queries(i: jax.Array, _: Any) -> None:
        query, _ = tb.rows(i * block_queries, block_queries, num_queries)
        carried = [
            tb.dot(C_ref[query, part], value, trans_b=True)
            for part, value in zip(parts, state, strict=True)
        ]
        query_time = time_to(first_query + query)
        y = functools.reduce(jnp.add, carried) * jnp.exp(query_time * A)[:, None]

        # The ancestors of each query, one block of keys at a time.
        def from_keys(j: jax.Array, y: jax.Array) -> jax.Array:
            key, key_exists = tb.rows(j * block_keys, block_keys, num_nodes)
            scores = [tb.dot(C_ref[query, part], B_ref[key, part], trans_b=True) for part in parts]
            exponent = (query_time[:, None] - time_to(key)[None, :]) * A
            above = mask_ref[(first_query + query)[:, None], key[None, :]] & key_exists[None, :]
            decay = jnp.exp(jnp.where(above, exponent, -jnp.inf))
            weight = functools.reduce(jnp.add, scores) * decay * dt_ref[key][None, :]
            return y + tb.dot(weight, x_ref[key, :])

        # Ancestors come before their descendants: later blocks of keys hold none.
        end = jnp.minimum(first_query + (i + 1) * block_queries, num_nodes)
        num_blocks = lax.div(end + block_keys - 1, block_keys)
        write(query, lax.fori_loop(0, num_blocks, from_keys, y))

    lax.fori_loop(0, pl.cdiv(num_queries, block_queries), block_of_queries, None)
