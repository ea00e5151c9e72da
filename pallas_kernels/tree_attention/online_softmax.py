"""The online softmax that both attention kernels are made of, and the reduction over splits.

A program holds one block of rows: queries times the query heads that share a key head. For these
rows it keeps, over all keys so far, the weighted sums of the values, the sum of the weights and the
maximum of the scores (Milakov and Gimelshein 2018, arXiv:1805.02867). Programs that split a cache
write these three, and `combined` reduces them.

One order: a block of keys has a softmax alone, and blocks are merged number by number. Sums over
the keys of a block are products, whose order does not depend on the rows beside a row. So it is the
same whether a program holds 16 rows or 64, and which program merges two blocks.

Numerics: scores, weights and sums in float32; products as `triton.dot` says. Weights are not
rounded to bf16. Scores are masked before exp; a fully masked query gets zeros.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import triton as tb
from pallas_kernels.triton import Ref

_LARGEST_PART = 128  # channels of a head in one product

# Maximum of no scores. Finite, so that the difference of two of them is not NaN.
_NO_SCORE = float(jnp.finfo(jnp.float32).min)


class Softmax(NamedTuple):
    """The softmax of a block of rows over the keys so far, not yet normalised."""

    sums: list[Array]  # weighted sums of the values [rows, E], in the parts `channels`
    total: Array  # sum of the weights [rows]
    maximum: Array  # of the scores [rows]


def channels(count: int) -> list[pl.Slice]:
    """`range(count)` of the channels of a head, in parts of a power of two.

    Worked example, `channels(224)`: 128, 64 and 32 channels.
    """
    return tb.parts(count, _LARGEST_PART)


def load(ref: Ref, *rows: Array) -> list[Array]:
    """Rows of heads `[..., E]`, in the parts `channels`."""
    return [ref[(*rows, part)] for part in channels(ref.shape[-1])]


def store(ref: Ref, rows: tuple, values: list[Array]) -> None:
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
    query: list[Array],
    softmax: Softmax | None,
    keys: list[Array],
    values: list[Array],
    seen: Array,
    *,
    scale: float,
    interpret: bool,
) -> Softmax:
    """A softmax, if there is one, and that of queries `[rows, E]` over a block of keys.

    Queries, keys and values `[keys, E]` come in the blocks that `load` returns; `seen`
    `[rows or 1, keys]` is False where a key is masked.
    """
    products = [tb.dot(q, k, trans_b=True) for q, k in zip(query, keys, strict=True)]
    factor = jnp.full((), scale, jnp.float32)
    scores = functools.reduce(jnp.add, products)
    scores = tb.multiply_add(scores, factor, interpret=interpret)
    scores = jnp.where(seen, scores, -jnp.inf)
    maximum = jnp.maximum(jnp.max(scores, axis=1), _NO_SCORE)
    weight = jnp.exp(scores - maximum[:, None])
    # A reduction would add up in another order for another number of rows.
    ones = jnp.ones((weight.shape[1], tb.SMALLEST_BLOCK), jnp.bfloat16)
    totals = tb.dot(weight, ones, exact=values[0].dtype == jnp.float32)
    block = Softmax([tb.dot(weight, v) for v in values], jnp.max(totals, axis=1), maximum)
    return block if softmax is None else merged(softmax, block, interpret=interpret)


def merged(left: Softmax, right: Softmax, *, interpret: bool) -> Softmax:
    """The softmax over the keys of both. One over no keys changes nothing."""
    fused = functools.partial(tb.multiply_add, interpret=interpret)
    maximum = jnp.maximum(left.maximum, right.maximum)
    a, b = jnp.exp(left.maximum - maximum), jnp.exp(right.maximum - maximum)
    sums = [
        fused(x, a[:, None], fused(y, b[:, None]))
        for x, y in zip(left.sums, right.sums, strict=True)
    ]
    return Softmax(sums, fused(left.total, a, fused(right.total, b)), maximum)


def attend_cache(
    attend: Callable[..., Softmax],
    softmax: Softmax,
    keys_ref: Ref,
    values_ref: Ref,
    length: Array,
    *,
    block: int,
    split: Array,
    splits: int,
) -> Softmax:
    """Adds a split of a cache: blocks `split`, `split + splits`, ... of `length` positions."""

    def step(i: Array, softmax: Softmax) -> Softmax:
        first = (split + i * splits) * block
        place, exists = tb.rows(first, block, keys_ref.shape[0])
        seen = (exists & (place < length))[None, :]
        return attend(softmax, load(keys_ref, place), load(values_ref, place), seen)

    num_blocks = lax.div(length + block - 1, block)
    return lax.fori_loop(0, lax.div(num_blocks - split + splits - 1, splits), step, softmax)


def query_block(num_queries: int, per_group: int, head_dim: int) -> pl.BlockSpec:
    """The query heads of a program's key head, of `[B, Q, W, E]`."""
    return pl.BlockSpec((None, num_queries, per_group, head_dim), lambda i, u, b: (b, 0, u, 0))


def outputs(
    shape: tuple[int, ...], dtype: DTypeLike, *, per_group: int, parts: int
) -> dict[str, tuple[Any, pl.BlockSpec]]:
    """The outputs of a kernel with queries of this shape: `y`, or the parts of a softmax."""
    batch, num_queries, num_heads, head_dim = shape
    if parts == 1:
        of_queries = query_block(num_queries, per_group, head_dim)
        return {"y": (jax.ShapeDtypeStruct(shape, dtype), of_queries)}

    def of_parts(*size: int) -> tuple[Any, pl.BlockSpec]:
        whole = (batch, parts, num_queries, num_heads, *size)
        block = (None, parts, num_queries, per_group, *size)
        return (
            jax.ShapeDtypeStruct(whole, jnp.float32),
            pl.BlockSpec(block, lambda i, u, b: (b, 0, 0, u, 0)[: len(block)]),
        )

    return {"sums": of_parts(head_dim), "total": of_parts(), "maximum": of_parts()}


def write(output_refs: dict[str, Ref], part: Array, row: tuple, softmax: Softmax) -> None:
    """Writes what `outputs` lists; `row` is the query and the head of each row."""
    if "y" in output_refs:
        # A total is at least 1, the weight of the maximum, unless nothing was seen.
        divisor = jnp.maximum(softmax.total, 1.0)[:, None]
        store(output_refs["y"], row, [value / divisor for value in softmax.sums])
    else:
        store(output_refs["sums"], (part, *row), softmax.sums)
        output_refs["total"][(part, *row)] = softmax.total
        output_refs["maximum"][(part, *row)] = softmax.maximum


def combined(
    results: dict[str, Array],
    dtype: DTypeLike,
    *,
    splits: int,
    tails: dict[str, Array],
    block: int = 0,
    capacity: int = 0,
    interpret: bool,
) -> Array:
    """The normalised softmax over all parts `[B, Q, W, E]`, from what `outputs` lists.

    A separate kernel, because every part must have ended. A program reduces one query and head. It
    first adds the blocks of the tail to their splits, and then pairs of splits, pairs of pairs, and
    so on: the sum of two numbers has one order.

    Args:
        results: the parts; or `y`, which is returned.
        dtype: of the output.
        splits: how many of the parts are splits; the others are blocks of a tail.
        tails: "length", "path" if any, and "ancestors": see `pallas_triton_layer`. Empty: no tail.
        block: positions of a block, if there is a tail.
        capacity: of the cache; the outputs of rows that are longer are NaN.
    """
    if "y" in results:
        return results["y"]
    axes = {"sums": "b.qw.", "total": "b.qw", "maximum": "b.qw", "y": "bqw."}
    axes |= {"length": "b", "path": "b.", "ancestors": "bq."}
    batch, _, *shape = results["sums"].shape
    y = jax.ShapeDtypeStruct((batch, *shape), dtype)

    def named(arrays: dict[str, Any]) -> dict[str, Any]:
        return {name: tb.blocked(x, axes[name], "bqw") for name, x in arrays.items()}

    return tb.call_by_name(
        functools.partial(
            _combine, splits=splits, block=block, capacity=capacity, interpret=interpret
        ),
        named(results | tails),
        named({"y": y}),
        name="tree_attention_combine",
        num_warps=4,
        interpret=interpret,
        in_one_order=True,
        grid=y.shape[:3],
    )["y"]


def _combine(
    inputs: dict[str, Ref],
    outputs: dict[str, Ref],
    *,
    splits: int,
    block: int,
    capacity: int,
    interpret: bool,
) -> None:
    """A program of one query and head.

    Inputs: "sums" [parts, E]; "total", "maximum" [parts]; with a tail "length" [], "path" [O + 2]
    if any, "ancestors" [N + 2]. Output: "y" [E].
    """
    num_parts, head_dim = inputs["sums"].shape

    def part(index: Array, exists: Array) -> Softmax:
        def masked(name: str, *columns: pl.Slice) -> Array:
            mask = exists[:, None] if columns else exists
            return tb.masked_load(inputs[name], (index, *columns), mask, interpret=interpret)

        sums = [masked("sums", some) for some in channels(head_dim)]
        return Softmax(sums, masked("total"), jnp.where(exists, masked("maximum"), _NO_SCORE))

    split, exists = tb.rows(0, tb.padded_size(splits), splits)
    if num_parts == splits:
        softmax = part(split, exists)
    else:
        old_length = inputs["length"][...]
        length = old_length + (inputs["path"][0] if "path" in inputs else 0)
        first = lax.div(old_length, block)  # of the blocks of the tail
        end = lax.div(length + inputs["ancestors"][0] + block - 1, block)
        softmax = part(split, exists & (split < first))
        # Block i belongs to split `i % splits`.
        turn = lax.rem(split - lax.rem(first, splits) + splits, splits)
        for turns in range(0, num_parts - splits, splits):
            index = turns + turn
            exists_too = exists & (index < jnp.minimum(end - first, num_parts - splits))
            tail = part(splits + jnp.minimum(index, num_parts - splits - 1), exists_too)
            softmax = merged(softmax, tail, interpret=interpret)

    weight = jnp.exp(softmax.maximum - jnp.max(softmax.maximum))
    fused = functools.partial(tb.multiply_add, interpret=interpret)
    total = jnp.maximum(_sum(fused(softmax.total, weight)), 1.0)
    y = [_sum(fused(sums, weight[:, None])) / total for sums in softmax.sums]
    if capacity:
        # The cache is overfull: tokens are dropped, so no output is right.
        y = [jnp.where(length > capacity, jnp.nan, value) for value in y]
    store(outputs["y"], (), y)


def _sum(values: Array) -> Array:
    """The sum over the first axis, a power of two, of pairs and of pairs of pairs."""
    while (count := values.shape[0]) > 1:
        values = values.reshape(2, count // 2, *values.shape[1:]).sum(axis=0)
    return values.sum(axis=0)
