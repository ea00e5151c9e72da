"""The replay and the scan of one kernel program: some channels of one head."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.triton import Ref


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
    """The path's state update, and the decay of the initial state.

    The update is a tuple of blocks `[p, s]`, because Triton cannot slice `[p, S]`.
    """
    num_nodes, channels = x_ref.shape
    block_nodes = min(block_nodes, tb.padded_size(num_nodes))
    num_blocks = pl.cdiv(num_nodes, block_nodes)
    node = lax.broadcasted_iota(jnp.int32, (block_nodes, block_nodes), 0)
    other = lax.broadcasted_iota(jnp.int32, (block_nodes, block_nodes), 1)

    def from_block(i: jax.Array, carry: Any) -> Any:
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
class HeadTree:
    """The new tree for one program: refs of x, dt, B, C and mask.

    Attributes:
        A: the head's decay rate.
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

        def block_of_queries(i: jax.Array, _: Any) -> None:
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
        """Outputs of one block of queries, without the skip; `carried` is the state's share."""
        num_nodes, num_queries = self.x.shape[0], self.C.shape[0]
        block_queries = query.shape[0]
        first_query = num_nodes - num_queries  # queries are the last nodes

        def time_to(rows: jax.Array) -> jax.Array:
            """The sum of dt along the paths to some nodes, one block of ancestors at a time."""

            def of_block(j: jax.Array, total: jax.Array) -> jax.Array:
                node, exists = tb.rows(j * block_keys, block_keys, num_nodes)
                path = self.mask[rows[:, None], node[None, :]] & exists[None, :]
                return total + jnp.sum(jnp.where(path, self.dt[node][None, :], 0.0), axis=1)

            zero = jnp.zeros(rows.shape, jnp.float32)
            return lax.fori_loop(0, pl.cdiv(num_nodes, block_keys), of_block, zero)

        query_time = time_to(first_query + query)
        y = carried * jnp.exp(query_time * self.A)[:, None]

        # The ancestors of each query, one block of keys at a time.
        def from_keys(j: jax.Array, y: jax.Array) -> jax.Array:
            key, key_exists = tb.rows(j * block_keys, block_keys, num_nodes)
            scores = [
                tb.dot(self.C[query, part], self.B[key, part], trans_b=True) for part in self.parts
            ]
            exponent = (query_time[:, None] - time_to(key)[None, :]) * self.A
            above = self.mask[(first_query + query)[:, None], key[None, :]] & key_exists[None, :]
            decay = jnp.exp(jnp.where(above, exponent, -jnp.inf))
            weight = functools.reduce(jnp.add, scores) * decay * self.dt[key][None, :]
            return y + tb.dot(weight, self.x[key, :])

        # Ancestors come before their descendants: later blocks of keys hold none.
        end = jnp.minimum(first_query + (block + 1) * block_queries, num_nodes)
        return lax.fori_loop(0, lax.div(end + block_keys - 1, block_keys), from_keys, y)
