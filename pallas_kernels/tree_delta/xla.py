"""The gated delta rule in closed form, with XLA's own matrix products.

The u of all nodes solve a unit triangular system (TreeWY, arXiv:2608.20961). Its inverse is formed
once and multiplies all channels, see `inverse`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.numerics import batched_product, contract
from pallas_kernels.tree_scan.xla import advanced, to_the_end

EPSILON = 1e-6  # of the norm of q and k, in all published models
LEAST_LOG = -128.0  # exp of it is 0
STEP = 1 / 256
BLOCK = 8  # rows of the blocks that are inverted by substitution


class Pairs(NamedTuple):
    """Relations of the nodes of a tree; nothing of them depends on the state or on v."""

    # q, then k, of the Q query nodes `[B, G, 2 * Q, S]`, normed. Where channels have decays of
    # their own, these are factors of the rows, which are then `[B, H, 2 * Q, S]`
    rows: Array
    beta: Array  # `[B, H, Q, 1]`
    # How much of the state before the root a query node has left `[B, H, Q, 1]`; or 1, if the rows
    # have it
    kept: Array
    scores: Array  # weights of u in the outputs `[B, H, Q, N]`
    # Weights of u in the u of their descendants `[B, H, Q, N]`, below the diagonal
    system: Array
    solution: Array  # the inverse of one plus the last Q columns of `system` `[B, H, Q, Q]`


def scan(
    previous: Any, tree: Any, state: Array, prefix_u: Array | None
) -> tuple[Array | None, Array | None, Array]:
    """See `api._run`, whose arrays these are. One tree after the other."""
    if previous is not None:
        k, u, g, path = previous
        ends = to_the_end(kept_where(path, g))
        state = at_the_end(state, normed(kept_where(path, k)), kept_where(path, u), *ends)
    if tree is None:
        return None, None, state
    q, k, v, g, beta, mask = tree
    first = mask.shape[1] - q.shape[1]
    exists = jnp.diagonal(mask, axis1=1, axis2=2)
    nodes = pairs(q, k, g, beta, mask)
    values = kept_where(exists[:, first:], v).transpose(0, 2, 1, 3)
    above = None
    if prefix_u is not None:
        above = kept_where(exists[:, :first], prefix_u).transpose(0, 2, 1, 3)
    y, u = (x.transpose(0, 2, 1, 3) for x in outputs(nodes, values, state, above))
    return y.astype(v.dtype), u, state


def delta_chunks(*arrays: Array, chunk_size: int) -> tuple[Array, Array]:
    """See `api.delta_chunks`, whose arrays these are. A chunk is a chain.

    All that does not depend on the state is computed for all chunks at once.
    """
    q, k, v, g, beta, state, valid = arrays
    batch, length = valid.shape
    chunk_size = min(chunk_size, length)
    dtype = v.dtype

    # With t positions of a chunk. [B * chunks, t, ...]
    def chunked(array: Array) -> Array:
        pad = [(0, 0), (0, -length % chunk_size)] + [(0, 0)] * (array.ndim - 2)
        return jnp.pad(array, pad).reshape(-1, chunk_size, *array.shape[2:])

    q, k, v, g, beta, valid = (chunked(array) for array in (q, k, v, g, beta, valid))
    causal = jnp.tril(jnp.ones((1, chunk_size, chunk_size), bool)) & valid[:, None]
    v, g = kept_where(valid, v).transpose(0, 2, 1, 3), kept_where(valid, g)
    parts = (pairs(q, k, g, beta, causal), v, normed(kept_where(valid, k)), *to_the_end(g))

    # [chunks, B, ...]
    def by_chunk(array: Array) -> Array:
        return array.reshape(batch, -1, *array.shape[1:]).swapaxes(0, 1)

    def step(state: Array, chunk: tuple) -> tuple[Array, Array]:
        nodes, v, k, weight, total = chunk
        y, u = outputs(nodes, v, state)
        return at_the_end(state, k, u.transpose(0, 2, 1, 3), weight, total), y

    state, y = lax.scan(step, state, jax.tree.map(by_chunk, parts))
    y = y.transpose(1, 0, 3, 2, 4)  # [B, chunks, t, H, P]
    return y.reshape(batch, -1, *y.shape[3:])[:, :length].astype(dtype), state


def pairs(q: Array, k: Array, g: Array, beta: Array, mask: Array) -> Pairs:
    """Nodes that do not exist get zeros."""
    num_queries, num_heads = beta.shape[1:]
    batch, num_nodes, num_groups, size = k.shape
    first = num_nodes - num_queries
    exists = jnp.diagonal(mask, axis1=1, axis2=2)
    query_mask = (mask & exists[:, :, None])[:, None, first:]
    q = normed(kept_where(exists[:, first:], q)) * size**-0.5
    k = normed(kept_where(exists, k))
    beta = kept_where(exists[:, first:], beta).transpose(0, 2, 1)[..., None]
    rows = jnp.concatenate([q, k[:, first:]], axis=1).transpose(0, 2, 1, 3)

    # 1. Decay from node j to query i [B, H, Q, N, S or 1]. Sums of g from the root on are of
    #    multiples of STEP, which are exact, and of what g has beyond them, which stay small: the
    #    difference of two plain sums loses 3e-5 if one node's g is -100.
    g = jnp.maximum(kept_where(exists, g), LEAST_LOG)
    coarse = lax.stop_gradient(jnp.round(g / STEP) * STEP)
    above = mask.astype(jnp.float32)
    sums = [contract("bij,bjhs->bhis", above, part) for part in (coarse, g - coarse)]
    difference = sum(part[:, :, first:, None] - part[:, :, None] for part in sums)
    decay = jnp.exp(jnp.where(query_mask[..., None], difference, -jnp.inf))
    kept = jnp.exp((sums[0] + sums[1])[:, :, first:])

    # 2. Products of q and of k with all keys. Heads of a group share them, unless each of their
    #    numbers decays by itself.
    k = k.transpose(0, 2, 1, 3)
    if g.shape[-1] == 1:
        products = batched_product(rows, k, transpose_right=True)
        products = products.reshape(batch, num_groups, 1, 2, num_queries, num_nodes)
        weights = products * decay.reshape(batch, num_groups, -1, 1, num_queries, num_nodes)
    else:
        rows, k = of_heads(rows, num_heads), of_heads(k, num_heads)
        in_two = rows.reshape(batch, num_heads, 2, num_queries, 1, size)
        weights = (in_two * decay[:, :, None] * k[:, :, None, None]).sum(axis=-1)
        rows, kept = rows * jnp.tile(kept, (1, 1, 2, 1)), jnp.ones_like(beta)
    weights = weights.reshape(batch, num_heads, 2, num_queries, num_nodes)
    strict = query_mask & ~jnp.eye(num_nodes, dtype=bool)[first:]
    system = jnp.where(strict, weights[:, :, 1] * beta, 0.0)
    return Pairs(
        rows=rows,
        beta=beta,
        kept=kept,
        scores=weights[:, :, 0],
        system=system,
        solution=inverse(system[..., first:]),
    )


def outputs(
    nodes: Pairs, v: Array, state: Array, above: Array | None = None
) -> tuple[Array, Array]:
    """Outputs and u of the query nodes `[B, H, Q, P]`; `above` is u of the nodes before them."""
    batch, num_heads, num_queries, size = v.shape
    num_groups = nodes.rows.shape[1]  # or heads
    grouped = state.reshape(batch, num_groups, -1, state.shape[-1])
    read = batched_product(grouped, nodes.rows, transpose_right=True)
    read = read.reshape(batch, num_heads, size, 2, num_queries).transpose(0, 1, 3, 4, 2)
    read = read * nodes.kept[:, :, None]
    right = nodes.beta * (v - read[:, :, 1])
    if above is not None:
        first = above.shape[2]
        right = right - batched_product(nodes.system[..., :first], above)
    u = batched_product(nodes.solution, right)
    whole = u if above is None else jnp.concatenate([above, u], axis=2)
    return read[:, :, 0] + batched_product(nodes.scores, whole), u


def at_the_end(state: Array, k: Array, u: Array, weight: Array, total: Array) -> Array:
    """The state after nodes with such k and u, and such decays to the end, see `to_the_end`."""
    state = total[:, :, None] * state
    if weight.shape[-1] == 1:
        return advanced(state, k, u * weight)
    return advanced(state, of_heads(k, u.shape[2], axis=2) * weight, u)


def of_heads(groups: Array, num_heads: int, axis: int = 1) -> Array:
    """An array with its groups' numbers for each of their heads."""
    return jnp.repeat(groups, num_heads // groups.shape[axis], axis=axis)


def inverse(system: Array) -> Array:
    """The inverse of one plus strictly lower triangular matrices `[B, H, N, N]`.

    Blocks on the diagonal are inverted by substitution, and then pairs of them are merged:

        [I + L    0  ]^-1   [    X      0]
        [  C    I + M]    = [-Y C X     Y]    with X and Y the inverses of I + L and I + M.

    An entry below the diagonal of X, Y or the result is at most its row's beta: it is a product of
    contractions between two keys. So nothing large cancels, as in the series of powers it would.
    """
    count = system.shape[-1]
    size = min(count, BLOCK)
    padded = size
    while padded < count:
        padded *= 2
    after = (0, padded - count)
    system = jnp.pad(system, ((0, 0), (0, 0), after, after))
    found = by_substitution(diagonal_blocks(system, size))
    while size < padded:
        across = diagonal_blocks(system, 2 * size)[..., size:, :size]
        upper, lower = found[:, :, 0::2], found[:, :, 1::2]
        across = contract("bhnij,bhnjk->bhnik", across, upper)
        across = contract("bhnij,bhnjk->bhnik", lower, across)
        found = jnp.concatenate(
            [
                jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
                jnp.concatenate([-across, lower], axis=-1),
            ],
            axis=-2,
        )
        size *= 2
    return found[:, :, 0, :count, :count]


def by_substitution(blocks: Array) -> Array:
    """The inverse of one plus small strictly lower triangular matrices, row by row."""
    unit = jnp.broadcast_to(jnp.eye(blocks.shape[-1], dtype=jnp.float32), blocks.shape)
    rows: list[Array] = []
    for i in range(blocks.shape[-1]):
        row = unit[..., i, :]
        for j, above in enumerate(rows):
            row = row - blocks[..., i, j, None] * above
        rows.append(row)
    return jnp.stack(rows, axis=-2)


def diagonal_blocks(matrices: Array, size: int) -> Array:
    """The blocks on the diagonal `[B, H, N / size, size, size]` of `[B, H, N, N]`."""
    starts = range(0, matrices.shape[-1], size)
    return jnp.stack([matrices[..., i : i + size, i : i + size] for i in starts], axis=2)


def normed(x: Array) -> Array:
    """Vectors `[..., S]` of length 1, float32."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON)


def kept_where(exists: Array, x: Array) -> Array:
    """Float32 rows `[B, N, ...]`, and zeros where no node is: NaN times 0 is NaN."""
    where = exists.reshape(*exists.shape, *(1,) * (x.ndim - 2))
    return jnp.where(where, x.astype(jnp.float32), 0.0)
