"""`tree_delta`, `replay_delta` and `replay_tree_delta` as one Pallas-Triton kernel.

There are two, `recurrence` and the closed form. The recurrence runs for up to `MOST_NODES` nodes,
and for any number where `dispatch.wants_bits()`. Here is the closed form. Replay is always the
recurrence's, so a state has the same bits whatever tree comes next.

Passes: a program handles one row, one value head and one block of its channels. It goes along the
path of the previous tree, if there is one, and writes the state once (input and output are one
buffer). It reads its part of the state once and keeps it in registers. It takes the nodes block by
block, parents first: it reads the u of the blocks before from memory, where it wrote them, and
solves the block's own system by substitution, a level at a time. Blocks of channels of one head
compute products of keys again.

Numerics: float32; products as `triton.dot` says, exact. q and k stay as they are in products, and
rows and columns of the products are divided by their lengths. The decay from node to node is a
difference of sums whose larger part is exact, see `_Decays`. Masked before exp. Where all keys of a
path are equal and beta is near 1, u is the small difference of neighbours' values, and what the
products have lost is in all u below: its error grows to some 4e-7 in a chain of 64 nodes, that of
the recurrence to 2e-7.

Refuses head and state sizes that are not powers of two of at least 16, and larger states than
`MOST_STATE`. Any numbers of nodes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import dispatch, walk
from pallas_kernels import triton as tb
from pallas_kernels.tree_delta import recurrence
from pallas_kernels.tree_delta.xla import EPSILON
from pallas_kernels.tree_scan.head_blocks import HeadBlocks
from pallas_kernels.triton import Ref

# The most nodes for which the recurrence is faster. On an H200 (design trial, heads of
# Qwen3.5-0.8B, 1 to 8 rows) 5 nodes took 0.66 to 0.75 of the closed form's time, and 16 nodes 1.2
# to 1.8 times.
MOST_NODES = 8
# Float32 inputs with states of 128 spill registers on sm_90 with 16 or 32 channels per program, and
# with 4 or 8 warps. Larger states of other inputs were not tried.
MOST_STATE = {"float32": 64, "bfloat16": 128}
# The fastest on an H200 (`benchmarks/results`). On sm_80 to sm_89 two cases spill: float32 inputs
# of 16 channels and states of 64 (sm_80), and more than 64 nodes.
_NODES = 16  # per block
_ANCESTORS = 64  # of a node, whose decays are added up at once
_CHANNELS = 32  # of the head, per program
_NUM_WARPS = 4


def unsupported(head_dim: int, state_size: int, dtype: DTypeLike) -> str | None:
    """Why these shapes cannot run, or None."""
    return tb.unsupported_state(head_dim, state_size, dtype, MOST_STATE)


def tree_delta(*arrays: Any, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """See `api.tree_delta`, whose arrays these are."""
    q, k, v, g, beta, state, mask, prefix_u = arrays
    tree = (q, k, v, g, beta, mask)
    way = ("tree_delta", _is_recurrent(mask), interpret)
    results = _run(*way, state, tree=tree, prefix_u=prefix_u)
    u = results["u"]
    return results["y"], u if prefix_u is None else jnp.concatenate([prefix_u, u], axis=1)


def replay_delta(*arrays: jax.Array, interpret: bool) -> jax.Array:
    """See `api.replay_delta`, whose arrays these are."""
    k, u, g, state, path = arrays
    return _run("replay_delta", True, interpret, state, previous=(k, u, g, path))["state"]


def replay_tree_delta(
    *arrays: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.replay_tree_delta`, whose arrays these are."""
    previous, (*nodes, state, mask) = arrays[:4], arrays[4:]
    way = ("replay_tree_delta", _is_recurrent(mask), interpret)
    results = _run(*way, state, previous=previous, tree=(*nodes, mask))
    return results["y"], results["u"], results["state"]


def _is_recurrent(mask: jax.Array) -> bool:
    return mask.shape[-1] <= MOST_NODES or dispatch.wants_bits()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    name: str,
    recurrent: bool,
    interpret: bool,
    state: jax.Array,
    *,
    previous: tuple[jax.Array, ...] | None = None,
    tree: tuple[jax.Array, ...] | None = None,
    prefix_u: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """A kernel with a previous tree, a new one, or both; returns what these give by name.

    `previous` is k, u, g and path; `tree` is q, k, v, g, beta and mask.
    """
    batch, num_heads, head_dim, state_size = state.shape
    some_k = previous[0] if previous else tree[1]  # type: ignore[index]
    channels = min(recurrence.CHANNELS if recurrent else _CHANNELS, head_dim)
    part = HeadBlocks(channels, state_size, num_heads // some_k.shape[2])

    inputs = {"state": (state, part.state)}
    outputs: dict[str, tuple[Any, pl.BlockSpec]] = {}
    if previous is not None:
        k, u, g, path = previous
        length, steps = k.shape[1], walk.steps(path)
        inputs |= {
            "prev k": (k, part.of_group(length)),
            "prev u": (u, part.of_channels(length)),
            "prev g": (g, part.of_head(length)),
            "steps": (steps, part.of_row(steps)),
        }
        outputs["state"] = inputs["state"]
    if tree is not None:
        q, k, v, g, beta, mask = tree
        num_nodes, num_queries = k.shape[1], q.shape[1]
        inputs |= {
            "q": (q, part.of_group(num_queries)),
            "k": (k, part.of_group(num_nodes)),
            "v": (v, part.of_channels(num_queries)),
            "g": (g, part.of_head(num_nodes)),
            "beta": (beta, part.of_head(num_queries)),
        }
        order = walk.visits(mask, num_queries) if recurrent else mask
        inputs["visits" if recurrent else "mask"] = (order, part.of_row(order))
        new_u = jax.ShapeDtypeStruct(v.shape, jnp.float32)
        outputs |= {"y": inputs["v"], "u": (new_u, part.of_channels(num_queries))}
    if prefix_u is not None and prefix_u.size:
        inputs["prefix u"] = (prefix_u, part.of_channels(prefix_u.shape[1]))
    return tb.call_by_name(
        functools.partial(recurrence.kernel if recurrent else _kernel, interpret=interpret),
        inputs,
        outputs,
        in_place={"state": "state"} if previous is not None else {},
        name=f"{name}_recurrence" if recurrent else name,
        num_warps=recurrence.NUM_WARPS if recurrent else _NUM_WARPS,
        num_stages=1,
        interpret=interpret,
        in_one_order=recurrent,
        grid=(batch, num_heads, head_dim // channels),
    )


def _kernel(inputs: dict[str, Ref], outputs: dict[str, Ref], *, interpret: bool) -> None:
    """Refs by name, of one row and one head; p channels of it.

    inputs: state [p, S]; of a previous tree prev k [O, S], prev u [O, p], prev g [O] and path [O];
    of a new tree q [Q, S], k [N, S], v [Q, p], g [N], beta [Q], mask [N, N], and perhaps prefix u
    [N - Q, p].
    outputs: state [p, S] after the path; y and u [Q, p].
    """
    if "steps" in inputs:
        recurrence.Rule(interpret).replay(inputs, outputs)
        tb.barrier(interpret)  # the state is read in another layout
    state = (outputs if "steps" in inputs else inputs)["state"][...]
    _scan_tree(inputs, outputs, state, interpret)


class _Decays(NamedTuple):
    """The sums of g along the paths to some nodes, each in two parts `[n]`.

    A multiple of 1/256, which is exact up to 2^16 (that is 512 nodes of the least g), and the rest,
    which is below 1/256 a node. So the difference of two sums has no more error than a sum over the
    nodes between.
    """

    coarse: jax.Array
    fine: jax.Array

    @classmethod
    def of(cls, node: jax.Array, g_ref: Ref, mask_ref: Ref) -> "_Decays":
        num_nodes = mask_ref.shape[0]
        size = min(_ANCESTORS, tb.padded_size(num_nodes))

        def of_block(i: jax.Array, sums: "_Decays") -> "_Decays":
            other, exists = tb.rows(i * size, size, num_nodes)
            exists &= mask_ref[other, other]
            path = mask_ref[node[:, None], other[None, :]] & exists[None, :]
            g = jnp.maximum(g_ref[other], -128.0)  # whose exp is 0 already
            coarse = jnp.floor(g * 256) / 256
            parts = zip(sums, (coarse, g - coarse), strict=True)
            return cls(*(x + jnp.sum(jnp.where(path, y[None, :], 0.0), axis=1) for x, y in parts))

        zero = jnp.zeros(node.shape, jnp.float32)
        return lax.fori_loop(0, pl.cdiv(num_nodes, size), of_block, cls(zero, zero))

    def exponents(self, other: "_Decays") -> jax.Array:
        """Log-decays `[n, m]` from other nodes to these, where those are above these."""
        coarse, fine = (x[:, None] - y[None, :] for x, y in zip(self, other, strict=True))
        return coarse + fine


def _scan_tree(
    inputs: dict[str, Ref], outputs: dict[str, Ref], state: jax.Array, interpret: bool
) -> None:
    """Writes y and u of all queries; see `_kernel`. `state` [p, S]."""
    q_ref, k_ref, mask_ref = inputs["q"], inputs["k"], inputs["mask"]
    num_queries, state_size = q_ref.shape
    first = k_ref.shape[0] - num_queries  # queries are the last nodes
    decays = functools.partial(_Decays.of, g_ref=inputs["g"], mask_ref=mask_ref)

    def block_of_queries(i: jax.Array, _: Any) -> None:
        query, exists = tb.rows(i * _NODES, _NODES, num_queries)
        node = first + query
        real = mask_ref[node, node]
        q, q_scale = _rows(q_ref, query, real)
        k, k_scale = _rows(k_ref, node, real)
        q_scale = q_scale * state_size**-0.5
        beta = jnp.where(real, inputs["beta"][query], 0.0)
        k_scale = k_scale * beta
        of_node = decays(node)
        kept = jnp.exp(of_node.coarse + of_node.fine)
        y, right = (
            tb.dot(rows, state, trans_b=True, exact=True) * (kept * scale)[:, None]
            for rows, scale in ((q, q_scale), (k, k_scale))
        )
        right = beta[:, None] * _kept(inputs["v"], query, real) - right

        def weights(key: jax.Array, key_exists: jax.Array) -> tuple[jax.Array, ...]:
            """Of the nodes' u in y and in u of the queries `[n, m]`, and which are ancestors."""
            keys, scale = _rows(k_ref, key, key_exists)
            above = mask_ref[node[:, None], key[None, :]] & real[:, None] & key_exists[None, :]
            decay = jnp.exp(jnp.where(above, of_node.exponents(decays(key)), -jnp.inf))
            decay = decay * scale[None, :]
            scores = tb.dot(q, keys, trans_b=True) * decay * q_scale[:, None]
            system = tb.dot(k, keys, trans_b=True) * decay * k_scale[:, None]
            return scores, jnp.where(node[:, None] == key[None, :], 0.0, system), above

        def from_nodes(start: int, u_ref: Ref) -> Callable[[jax.Array, Any], Any]:
            """Adds the nodes from `start` on, whose u are there."""

            def from_block(j: jax.Array, carry: Any) -> Any:
                y, right = carry
                place, key_exists = tb.rows(j * _NODES, _NODES, u_ref.shape[0])
                key = start + place
                key_exists &= mask_ref[key, key]
                scores, system, _ = weights(key, key_exists)
                u = _kept(u_ref, place, key_exists)
                return y + tb.dot(scores, u), right - tb.dot(system, u)

            return from_block

        if first:
            num_blocks = pl.cdiv(first, _NODES)
            y, right = lax.fori_loop(0, num_blocks, from_nodes(0, inputs["prefix u"]), (y, right))
        y, right = lax.fori_loop(0, i, from_nodes(first, outputs["u"]), (y, right))
        scores, system, above = weights(node, real & exists)
        u = _solved(system, right, above)
        outputs["u"][query, :] = u
        outputs["y"][query, :] = (y + tb.dot(scores, u)).astype(outputs["y"].dtype)
        tb.barrier(interpret)  # the next block reads u

    lax.fori_loop(0, pl.cdiv(num_queries, _NODES), block_of_queries, None)


def _solved(system: jax.Array, right: jax.Array, above: jax.Array) -> jax.Array:
    """The u `[n, p]` of `u + system u = right`; `above`: which nodes are ancestors or the same.

    The u of a node is right once those of its ancestors are: a round for each level of the block.
    """
    levels = jnp.max(jnp.sum(above.astype(jnp.int32), axis=1))
    return lax.fori_loop(1, levels, lambda _, u: right - tb.dot(system, u), right)


def _rows(ref: Ref, index: jax.Array, exists: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows `[n, S]` of q or k as they are, zeros where no node is, and one over their lengths."""
    values = jnp.where(exists[:, None], ref[index, :], 0)
    wide = values.astype(jnp.float32)
    return values, lax.rsqrt(jnp.sum(wide * wide, axis=1) + EPSILON)


def _kept(ref: Ref, index: jax.Array, exists: jax.Array) -> jax.Array:
    """Float32 rows `[n, p]`, zeros where no node is: NaN times 0 is NaN."""
    return jnp.where(exists[:, None], ref[index, :].astype(jnp.float32), 0.0)
