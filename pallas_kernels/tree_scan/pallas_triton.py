"""`tree_scan` as one Pallas-Triton kernel.

Passes: a program handles one row, one head and one block of query nodes. It reads the state once
and the keys block by block, as flash attention does; of what it holds, only a tile of the mask,
block by N, grows with the tree (nothing spills up to N = 128). Nothing but the output is written.

Numerics: decays and accumulators are float32; products as `triton_backend.dot` says. Masked before
exp.

Refuses head and state sizes that are not powers of two. Node counts are padded.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_backend as tb
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
    first_query = num_nodes - num_queries
    heads_per_group = num_heads // num_groups
    keys, queries = tb.padded_size(num_nodes), tb.padded_size(num_queries)
    block_keys, block_queries = min(blocks.keys, keys), min(blocks.queries, queries)

    kernel = functools.partial(
        _kernel,
        first_query=first_query,
        block_keys=block_keys,
        block_state=min(blocks.state, state_size),
    )
    query_block = pl.BlockSpec((None, block_queries, None, head_dim), lambda b, h, i: (b, i, h, 0))
    output = tb.call(
        kernel,
        name="tree_scan",
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        grid=(batch, num_heads, queries // block_queries),
        in_specs=[
            query_block,
            pl.BlockSpec((None, keys, None, head_dim), lambda b, h, i: (b, 0, h, 0)),
            pl.BlockSpec((None, keys, None), lambda b, h, i: (b, 0, h)),
            pl.BlockSpec((None,), lambda b, h, i: (h,)),
            pl.BlockSpec(
                (None, keys, None, state_size), lambda b, h, i: (b, 0, h // heads_per_group, 0)
            ),
            pl.BlockSpec(
                (None, block_queries, None, state_size),
                lambda b, h, i: (b, i, h // heads_per_group, 0),
            ),
            pl.BlockSpec((None, head_dim), lambda b, h, i: (h, 0)),
            pl.BlockSpec((None, None, head_dim, state_size), lambda b, h, i: (b, h, 0, 0)),
            pl.BlockSpec((None, block_queries, keys), lambda b, h, i: (b, i, 0)),
            pl.BlockSpec((None, keys, keys), lambda b, h, i: (b, 0, 0)),
        ],
        out_specs=query_block,
        out_shape=jax.ShapeDtypeStruct((batch, queries, num_heads, head_dim), x.dtype),
    )(
        tb.pad(x[:, first_query:], queries),
        tb.pad(x, keys),
        tb.pad(dt, keys),
        A,
        tb.pad(B, keys),
        tb.pad(C, queries),
        D,
        state,
        tb.pad(mask[:, first_query:], queries, keys),
        tb.pad(mask, keys, keys),
    )
    return output[:, :num_queries]


def _kernel(
    query_x_ref,  # [q, P]
    x_ref,  # [N, P]
    dt_ref,  # [N]
    A_ref,  # []
    B_ref,  # [N, S]
    C_ref,  # [q, S]
    D_ref,  # [P]
    state_ref,  # [P, S]
    query_mask_ref,  # [q, N]
    mask_ref,  # [N, N]
    y_ref,  # [q, P]
    *,
    first_query: int,
    block_keys: int,
    block_state: int,
):
    num_queries, head_dim = query_x_ref.shape
    num_keys, state_size = B_ref.shape
    log_decay = dt_ref[...] * A_ref[...]  # of each node alone

    def accumulated(mask):
        return jnp.sum(jnp.where(mask, log_decay[None, :], 0.0), axis=1)

    query_decay = accumulated(query_mask_ref[...])

    # The state before the root, decayed to each query.
    def carried(k, total):
        part = pl.ds(k * block_state, block_state)
        return total + tb.dot(C_ref[:, part], state_ref[:, part], trans_b=True)

    y = lax.fori_loop(
        0, state_size // block_state, carried, jnp.zeros((num_queries, head_dim), jnp.float32)
    )
    y = y * jnp.exp(query_decay)[:, None]

    # The nodes above each query, one block of keys at a time.
    def from_keys(j, y):
        here = pl.ds(j * block_keys, block_keys)
        key_decay = accumulated(mask_ref[here, :])

        def score(k, total):
            part = pl.ds(k * block_state, block_state)
            return total + tb.dot(C_ref[:, part], B_ref[here, part], trans_b=True)

        scores = lax.fori_loop(
            0, state_size // block_state, score, jnp.zeros((num_queries, block_keys), jnp.float32)
        )
        exponent = query_decay[:, None] - key_decay[None, :]
        decay = jnp.exp(jnp.where(query_mask_ref[:, here], exponent, -jnp.inf))
        weight = scores * decay * dt_ref[here][None, :]
        return y + tb.dot(weight, x_ref[here, :])

    # Ancestors come before their descendants: later blocks of keys hold none.
    end = first_query + (pl.program_id(2) + 1) * num_queries
    num_blocks = jnp.minimum(lax.div(end + block_keys - 1, block_keys), num_keys // block_keys)
    y = lax.fori_loop(0, num_blocks, from_keys, y)

    y = y + D_ref[...][None, :] * query_x_ref[...].astype(jnp.float32)
    y_ref[...] = y.astype(y_ref.dtype)
