"""`tree_scan` in closed form (STree, equation 6 and after), with XLA's own matrix products."""

import jax.numpy as jnp

from pallas_kernels.numerics import batched_product, contract


def tree_scan(x, dt, A, B, C, D, state, mask):
    """See `api.tree_scan`."""
    batch, num_nodes, _, head_dim = x.shape
    num_queries, num_groups = C.shape[1:3]
    first_query = num_nodes - num_queries
    dtype, x = x.dtype, x.astype(jnp.float32)
    B, C = (v.astype(jnp.float32).transpose(0, 2, 1, 3) for v in (B, C))  # groups first

    # 1. Log-decay of every node, accumulated along its path. [B, N, H]
    decay = contract("bij,bjh->bih", mask.astype(jnp.float32), dt * A)
    query_decay = decay[:, first_query:]

    # 2. Weight of node j in query i. Masked before exp: the exponent of a node that is no
    #    ancestor can be positive and overflow. [B, H, Q, N]
    exponent = query_decay.transpose(0, 2, 1)[..., None] - decay.transpose(0, 2, 1)[:, :, None]
    exponent = jnp.where(mask[:, None, first_query:], exponent, -jnp.inf)
    weight = jnp.exp(exponent) * dt.transpose(0, 2, 1)[:, :, None]

    # 3. Scores C_i . B_j are shared by the heads of a group.
    scores = batched_product(C, B, transpose_right=True)[:, :, None]
    weight = (weight.reshape(batch, num_groups, -1, *weight.shape[2:]) * scores).reshape(
        weight.shape
    )
    y = batched_product(weight, x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    # 4. The state before the root, decayed to the query.
    carried = batched_product(
        C, state.reshape(batch, num_groups, -1, state.shape[-1]), transpose_right=True
    )
    carried = carried.reshape(batch, num_groups, num_queries, -1, head_dim)
    carried = carried.transpose(0, 2, 1, 3, 4).reshape(y.shape)
    y = y + carried * jnp.exp(query_decay)[..., None]

    return (y + D * x[:, first_query:]).astype(dtype)
