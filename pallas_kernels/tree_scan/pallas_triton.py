"""`tree_scan` as one Pallas-Triton kernel.

Passes: a program handles one row, one head and one block of query nodes. It reads the state once
and the keys block by block, as flash attention does; of what it holds, only a tile of the mask,
block by N, grows with the tree (nothing spills up to N = 128). Nothing but the output is written.

Numerics: decays and accumulators are float32; products as `triton.dot` says. Masked before
exp.

Refuses head and state sizes that are not powers of two. Any number of nodes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton as tb
from pallas_kernels.tree_scan.config import BlockSizes, block_sizes


def unsupported(head_dim: int, state_size: int) -> str | None:
    """Why these shapes cannot run, or None."""
    return tb.unsupported_size("head_dim", head_dim) or tb.unsupported_size(
        "state_size", state_size
    )


def tree_scan(x, dt, A, B, C, D, state, mask, *, interpret=False, blocks: BlockSizes | None = None):
    """See `api.tree_scan`."""
    blocks = blocks or block_sizes(x.dtype)
    batch, num_nodes, num_heads, head_dim = x.shape
    num_queries, num_groups, state_size = C.shape[1:]
    heads_per_group = num_heads // num_groups
    block_queries = min(blocks.queries, tb.padded_size(num_queries))

    def of_head(length, size):
        return pl.BlockSpec((None, length, None, size), lambda b, h, i: (b, 0, h, 0))

    def of_group(length):
        return pl.BlockSpec(
            (None, length, None, state_size), lambda b, h, i: (b, 0, h // heads_per_group, 0)
        )

    return tb.call(
        functools.partial(
            _kernel,
            block_queries=block_queries,
            block_keys=min(blocks.keys, tb.padded_size(num_nodes)),
            block_state=min(blocks.state, state_size),
        ),
        name="tree_scan",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, pl.cdiv(num_queries, block_queries)),
        in_specs=[
            of_head(num_nodes, head_dim),
            pl.BlockSpec((None, num_nodes, None), lambda b, h, i: (b, 0, h)),
            pl.BlockSpec((None,), lambda b, h, i: (h,)),
            of_group(num_nodes),
            of_group(num_queries),
            pl.BlockSpec((None, head_dim), lambda b, h, i: (h, 0)),
            pl.BlockSpec((None, None, head_dim, state_size), lambda b, h, i: (b, h, 0, 0)),
            pl.BlockSpec((None, num_nodes, num_nodes), lambda b, h, i: (b, 0, 0)),
        ],
        out_specs=of_head(num_queries, head_dim),
        out_shape=jax.ShapeDtypeStruct((batch, num_queries, num_heads, head_dim), x.dtype),
    )(x, dt, A, B, C, D, state, mask)


def _kernel(
    x_ref,
    dt_ref,
    A_ref,
    B_ref,
    C_ref,
    D_ref,
    state_ref,
    mask_ref,
    y_ref,
    *,
    block_queries: int,
    block_keys: int,
    block_state: int,
):
    (num_queries, state_size), head_dim = C_ref.shape, x_ref.shape[1]
    query, _ = tb.rows(pl.program_id(2) * block_queries, block_queries, num_queries)

    def part_of(k, total):
        part = pl.ds(k * block_state, block_state)
        return total + tb.dot(C_ref[query, part], state_ref[:, part], trans_b=True)

    carried = jnp.zeros((block_queries, head_dim), jnp.float32)
    carried = lax.fori_loop(0, state_size // block_state, part_of, carried)
    refs = (x_ref, dt_ref, A_ref[...], B_ref, C_ref, D_ref[...], mask_ref)
    y = outputs(carried, pl.program_id(2), *refs, block_keys=block_keys, block_state=block_state)
    y_ref[query, :] = y.astype(y_ref.dtype)


def outputs(
    carried,  # [q, P]
    block,  # []
    x_ref,  # [N, P]
    dt_ref,  # [N]
    A,  # []
    B_ref,  # [N, S]
    C_ref,  # [Q, S]
    D,  # [P], or [] for all channels
    mask_ref,  # [N, N]
    *,
    block_keys: int,
    block_state: int,
):
    """Outputs of one block of queries `[q, P]`, given what the state contributes before decay."""
    num_nodes, state_size = B_ref.shape
    num_queries, block_queries = C_ref.shape[0], carried.shape[0]
    first_query = num_nodes - num_queries  # queries are the last nodes
    query, _ = tb.rows(block * block_queries, block_queries, num_queries)
    node, node_exists = tb.rows(0, tb.padded_size(num_nodes), num_nodes)
    log_decay = jnp.where(node_exists, dt_ref[node] * A, 0.0)  # of each node alone

    def accumulated(rows):
        path = mask_ref[rows[:, None], node[None, :]]
        return jnp.sum(jnp.where(path, log_decay[None, :], 0.0), axis=1)

    query_decay = accumulated(first_query + query)
    y = carried * jnp.exp(query_decay)[:, None]

    # The nodes above each query, one block of keys at a time.
    def from_keys(j, y):
        key, key_exists = tb.rows(j * block_keys, block_keys, num_nodes)

        def score(k, total):
            part = pl.ds(k * block_state, block_state)
            return total + tb.dot(C_ref[query, part], B_ref[key, part], trans_b=True)

        scores = jnp.zeros((block_queries, block_keys), jnp.float32)
        scores = lax.fori_loop(0, state_size // block_state, score, scores)
        exponent = query_decay[:, None] - accumulated(key)[None, :]
        above = mask_ref[(first_query + query)[:, None], key[None, :]] & key_exists[None, :]
        decay = jnp.exp(jnp.where(above, exponent, -jnp.inf))
        weight = scores * decay * dt_ref[key][None, :]
        return y + tb.dot(weight, x_ref[key, :])

    # Ancestors come before their descendants: later blocks of keys hold none.
    end = jnp.minimum(first_query + (block + 1) * block_queries, num_nodes)
    y = lax.fori_loop(0, lax.div(end + block_keys - 1, block_keys), from_keys, y)
    return y + D * x_ref[first_query + query, :].astype(jnp.float32)
