"""The online softmax that both attention kernels are made of, and the reduction over splits.

A program holds one block of rows: queries times the query heads that share a key head. For these
rows it keeps, over all keys so far, the weighted sums of the values, the sum of the weights and the
maximum of the scores (Milakov and Gimelshein 2018, arXiv:1805.02867). Programs that split a cache
write these three, and `put_together` reduces them.

One order: a block of keys has a softmax alone, and blocks are merged number by number. Sums over
the keys of a block are products, whose order does not depend on the rows beside a row. So it is the
same whether a program holds 16 rows or 64, and which program merges two blocks.

Numerics: scores, weights and sums in float32; products as `triton.dot` says. Weights are not
rounded to bf16. Scores are masked before exp; a fully masked query gets zeros.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import triton as tb
from pallas_kernels.numerics import Deferred, static
from pallas_kernels.triton import Ref

NUM_WARPS = 4  # of what puts parts together
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftmaxParts(Deferred):
    """Outputs of attention `[B, Q, W E]` as parts of a softmax, which the reader puts together.

    A separate kernel does, because every part must have ended; or the product after it, of few
    rows. The blocks of the tail are added to their splits, and then pairs of splits, pairs of
    pairs, and so on: the sum of two numbers has one order.

    Attributes:
        arrays: "sums", "total" and "maximum", see `outputs`; and with a tail "length", "path" if
            any, and "ancestors", see `pallas_triton_layer`.
        dtype: of the outputs.
        splits: how many of the parts are splits; the others are blocks of a tail.
        block: positions of a block, if there is a tail.
        capacity: of the cache; the outputs of rows that are longer are NaN.
        interpret: whether the kernel is interpreted.
    """

    arrays: dict[str, Array]
    dtype: DTypeLike = static()
    splits: int = static()
    block: int = static(0)
    capacity: int = static(0)
    interpret: bool = static(False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs."""
        batch, _, queries, heads, head_dim = self.arrays["sums"].shape
        return batch, queries, heads * head_dim

    def blocked(self, grid: str) -> dict[str, Any]:
        """The arrays and their blocks, for a grid with or without rows "b", queries "q", heads."""
        axes = {"sums": "b.qw.", "total": "b.qw", "maximum": "b.qw"}
        axes |= {"length": "b", "path": "b.", "ancestors": "bq."}
        return {name: tb.blocked(x, axes[name], grid) for name, x in self.arrays.items()}

    def total(self) -> Array:
        batch, _, *shape = self.arrays["sums"].shape
        y = jax.ShapeDtypeStruct((batch, *shape), self.dtype)
        results = tb.call_by_name(
            functools.partial(_combine, put_together=self.put_together),
            self.blocked("bqw"),
            {"y": tb.blocked(y, "bqw.", "bqw")},
            name="tree_attention_combine",
            num_warps=NUM_WARPS,
            interpret=self.interpret,
            in_one_order=True,
            grid=y.shape[:3],
        )
        return results["y"].reshape(self.shape)

    @property
    def put_together(self) -> Callable[..., list[Array]]:
        """`put_together` for a kernel of these parts."""
        return functools.partial(
            put_together,
            splits=self.splits,
            block=self.block,
            capacity=self.capacity,
            interpret=self.interpret,
        )


def _combine(
    inputs: dict[str, Ref], outputs: dict[str, Ref], *, put_together: Callable[..., list[Array]]
) -> None:
    """A program of one query and head. Inputs: see `put_together`; output: "y" [E]."""
    store(outputs["y"], (), put_together(inputs))


def put_together(
    inputs: dict[str, Ref],
    row: tuple[Any, ...] = (),
    query: tuple[Any, ...] = (),
    head: tuple[Any, ...] = (),
    *,
    splits: int,
    block: int,
    capacity: int,
    interpret: bool,
) -> list[Array]:
    """The normalised softmax of a query's head, float32, in the parts `channels`.

    Inputs: "sums" [parts, E]; "total", "maximum" [parts]; with a tail "length" [], "path" [O + 2]
    if any, "ancestors" [N + 2]. Or those of all rows, queries and heads, and which are meant.
    """
    head_dim = inputs["sums"].shape[-1]
    num_parts = inputs["sums"].shape[len(row)]

    def part(index: Array, exists: Array) -> Softmax:
        def masked(name: str, *columns: pl.Slice) -> Array:
            mask = exists[:, None] if columns else exists
            place = (*row, index, *query, *head, *columns)
            return tb.masked_load(inputs[name], place, mask, interpret=interpret)

        sums = [masked("sums", some) for some in channels(head_dim)]
        return Softmax(sums, masked("total"), jnp.where(exists, masked("maximum"), _NO_SCORE))

    split, exists = tb.rows(0, tb.padded_size(splits), splits)
    if num_parts == splits:
        softmax = part(split, exists)
    else:
        old_length = inputs["length"][row or ...]
        length = old_length + (inputs["path"][*row, 0] if "path" in inputs else 0)
        first = lax.div(old_length, block)  # of the blocks of the tail
        end = lax.div(length + inputs["ancestors"][*row, *query, 0] + block - 1, block)
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
    return y


def _sum(values: Array) -> Array:
    """The sum over the first axis, a power of two, of pairs and of pairs of pairs."""
    while (count := values.shape[0]) > 1:
        values = values.reshape(2, count // 2, *values.shape[1:]).sum(axis=0)
    return values.sum(axis=0)
