"""The online softmax that both attention kernels are made of, and the reduction over splits.

A program holds one block of rows: queries times the query heads that share a key head. For these
rows it keeps, over all keys so far, the weighted sums of the values, the sum of the weights and the
maximum of the scores (Milakov and Gimelshein 2018, arXiv:1805.02867). Programs that split a cache
write these three, and `combined` reduces them.

Numerics: scores, weights and sums in float32; products as `triton.dot` says. Weights are not
rounded to bf16. Scores are masked before exp; a fully masked query gets zeros.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import triton as tb
from pallas_kernels.triton import Ref

_LARGEST_PART = 128  # channels of a head in one product

# Maximum of no scores. Finite, so that the difference of two of them is not NaN.
_NO_SCORE = float(jnp.finfo(jnp.float32).min)


class Softmax(NamedTuple):
    """The softmax of a block of rows over the keys so far, not yet normalised."""

    sums: list[jax.Array]  # weighted sums of the values [rows, E], in the parts `channels`
    total: jax.Array  # sum of the weights [rows]
    maximum: jax.Array  # of the scores [rows]


class Split(NamedTuple):
    """The share of a cache that a program reads: blocks `number`, `number + splits`, ..."""

    number: jax.Array
    splits: int


# Adds keys, values and which of them are seen to a softmax.
Attend = Callable[[Softmax, list[jax.Array], list[jax.Array], jax.Array], Softmax]


def channels(count: int) -> list[pl.Slice]:
    """`range(count)` of the channels of a head, in parts of a power of two.

    Worked example, `channels(224)`: 128, 64 and 32 channels.
    """
    return tb.parts(count, _LARGEST_PART)


def load(ref: Ref, *rows: jax.Array) -> list[jax.Array]:
    """Rows of heads `[..., E]`, in the parts `channels`."""
    return [ref[(*rows, part)] for part in channels(ref.shape[-1])]


def store(ref: Ref, rows: tuple, values: list[jax.Array]) -> None:
    """Writes what `load` reads, in the dtype of `ref`."""
    for part, value in zip(channels(ref.shape[-1]), values, strict=True):
        ref[(*rows, part)] = value.astype(ref.dtype)


def empty(num_rows: int, head_dim: int) -> Softmax:
    """The softmax over no keys."""
    return Softmax(
        [jnp.zeros((num_rows, part.size), jnp.float32) for part in channels(head_dim)],
        jnp.zeros((num_rows,), jnp.float32),
        jnp.full((num_rows,), _NO_SCORE, jnp.float32),
    )


def attend(
    query: list[jax.Array],
    scale: float,
    softmax: Softmax,
    keys: list[jax.Array],
    values: list[jax.Array],
    seen: jax.Array,
) -> Softmax:
    """Adds a block of keys and values `[keys, E]` to the running softmax of queries `[rows, E]`.

    Both come in the blocks that `load` returns; `seen` `[rows or 1, keys]` is False where a key is
    masked.
    """
    sums, total, maximum = softmax
    products = [tb.dot(q, k, trans_b=True) for q, k in zip(query, keys, strict=True)]
    scores = functools.reduce(jnp.add, products) * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
    weight = jnp.exp(scores - new_maximum[:, None])
    rescale = jnp.exp(maximum - new_maximum)
    sums = [
        part_sums * rescale[:, None] + tb.dot(weight, v)
        for part_sums, v in zip(sums, values, strict=True)
    ]
    return Softmax(sums, total * rescale + jnp.sum(weight, axis=1), new_maximum)


def attend_cache(
    attend: Attend, softmax: Softmax, cache: tuple[Ref, Ref, jax.Array], *, block: int, split: Split
) -> Softmax:
    """Adds a split of a cache: keys and values `[L, E]`, and the number of positions in use."""
    keys_ref, values_ref, length = cache
    num_blocks = lax.div(length + block - 1, block)

    def step(i: jax.Array, softmax: Softmax) -> Softmax:
        first = (split.number + i * split.splits) * block
        place, exists = tb.rows(first, block, keys_ref.shape[0])
        seen = (exists & (place < length))[None, :]
        return attend(softmax, load(keys_ref, place), load(values_ref, place), seen)

    # Blocks number, number + splits, ... below num_blocks.
    steps = lax.div(num_blocks - split.number + split.splits - 1, split.splits)
    return lax.fori_loop(0, steps, step, softmax)


def attend_nodes(
    attend: Attend,
    softmax: Softmax,
    nodes: tuple[Ref, Ref, Ref],
    query: jax.Array,
    *,
    last: jax.Array,
    block: int,
    split: Split,
) -> Softmax:
    """Adds the nodes of a tree, in the last split only.

    They are keys and values `[N, E]` and the mask `[Q, N]`. `query` is that of each row; nodes
    after the last of these are masked for all of them.
    """
    keys_ref, values_ref, mask_ref = nodes
    num_queries, num_nodes = mask_ref.shape
    num_seen = num_nodes - num_queries + last + 1

    def step(j: jax.Array, softmax: Softmax) -> Softmax:
        node, exists = tb.rows(j * block, block, num_nodes)
        seen = mask_ref[query[:, None], node[None, :]] & exists[None, :]
        return attend(softmax, load(keys_ref, node), load(values_ref, node), seen)

    num_blocks = lax.div(num_seen + block - 1, block)
    if split.splits > 1:
        num_blocks = num_blocks * (split.number == split.splits - 1).astype(jnp.int32)
    return lax.fori_loop(0, num_blocks, step, softmax)


def last_query(first_row: jax.Array, num_rows: int, per_group: int, num_queries: int) -> jax.Array:
    """The last query of a block of rows."""
    return jnp.minimum(lax.div(first_row + num_rows - 1, per_group), num_queries - 1)


def query_block(num_queries: int, per_group: int, head_dim: int) -> pl.BlockSpec:
    """The query heads of a program's key head, of `[B, Q, W, E]`."""
    return pl.BlockSpec((None, num_queries, per_group, head_dim), lambda i, k, u, b: (b, 0, u, 0))


Outputs = dict[str, tuple[Any, pl.BlockSpec]]  # shape and dtype, and block


def outputs(shape: tuple[int, ...], dtype: DTypeLike, *, per_group: int, splits: int) -> Outputs:
    """The outputs of a kernel with queries of this shape: `y`, or the parts of a softmax."""
    batch, num_queries, num_heads, head_dim = shape
    if splits == 1:
        of_queries = query_block(num_queries, per_group, head_dim)
        return {"y": (jax.ShapeDtypeStruct(shape, dtype), of_queries)}
    parts = (batch, splits, num_queries, num_heads)
    block = (None, None, num_queries, per_group)
    scalars = (
        jax.ShapeDtypeStruct(parts, jnp.float32),
        pl.BlockSpec(block, lambda i, k, u, b: (b, k, 0, u)),
    )
    vectors = (
        jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
        pl.BlockSpec((*block, head_dim), lambda i, k, u, b: (b, k, 0, u, 0)),
    )
    return {"sums": vectors, "total": scalars, "maximum": scalars}


def write(output_refs: dict[str, Ref], row: tuple, softmax: Softmax) -> None:
    """Writes what `outputs` lists; `row` is the query and the head of each row."""
    if "y" in output_refs:
        # A total is at least 1, the weight of the maximum, unless nothing was seen.
        divisor = jnp.maximum(softmax.total, 1.0)[:, None]
        store(output_refs["y"], row, [value / divisor for value in softmax.sums])
    else:
        store(output_refs["sums"], row, softmax.sums)
        output_refs["total"][row] = softmax.total
        output_refs["maximum"][row] = softmax.maximum


def combined(results: dict[str, jax.Array], dtype: DTypeLike, *, interpret: bool) -> jax.Array:
    """The normalised softmax over all splits `[B, Q, W, E]`, from what `outputs` lists.

    A separate kernel, because every split must have ended. A program reduces one query and head.
    """
    if "y" in results:
        return results["y"]
    batch, splits, num_queries, num_heads, head_dim = results["sums"].shape
    block = (None, splits, None, None)
    of_scalars = pl.BlockSpec(block, lambda b, q, w: (b, 0, q, w))
    shape = (batch, num_queries, num_heads, head_dim)
    return tb.call(
        _combine,
        name="tree_attention_combine",
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        grid=shape[:3],
        in_specs=[
            pl.BlockSpec((*block, head_dim), lambda b, q, w: (b, 0, q, w, 0)),
            of_scalars,
            of_scalars,
        ],
        out_specs=pl.BlockSpec((None, None, None, head_dim), lambda b, q, w: (b, q, w, 0)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
    )(results["sums"], results["total"], results["maximum"])


def _combine(
    sums_ref: Ref,  # [splits, E]
    totals_ref: Ref,  # [splits]
    maxima_ref: Ref,  # [splits]
    y_ref: Ref,  # [E]
) -> None:
    num_splits, head_dim = sums_ref.shape
    split, _ = tb.rows(0, tb.padded_size(num_splits), num_splits)
    maximum = jnp.max(maxima_ref[split])  # the last split may be there twice

    def step(i: jax.Array, carry: tuple) -> tuple:
        sums, total = carry
        split, exists = tb.rows(i * tb.SMALLEST_BLOCK, tb.SMALLEST_BLOCK, num_splits)
        weight = jnp.where(exists, jnp.exp(maxima_ref[split] - maximum), 0.0)
        sums = [
            part_sums + jnp.sum(part * weight[:, None], axis=0)
            for part_sums, part in zip(sums, load(sums_ref, split), strict=True)
        ]
        return sums, total + jnp.sum(totals_ref[split] * weight)

    no_sums = [jnp.zeros((part.size,), jnp.float32) for part in channels(head_dim)]
    nothing = (no_sums, jnp.zeros((), jnp.float32))
    sums, total = lax.fori_loop(0, pl.cdiv(num_splits, tb.SMALLEST_BLOCK), step, nothing)
    store(y_ref, (), [value / jnp.maximum(total, 1.0) for value in sums])
