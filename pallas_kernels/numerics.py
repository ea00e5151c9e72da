"""Shared float32 numerics."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field of a registered dataclass that is no array: programs are compiled for its value."""
    return dataclasses.field(default=default, metadata={"static": True})


def contract(spec: str, left: Array, right: Array) -> Array:
    """`einsum` with float32 products and float32 accumulation.

    Both must be requested: XLA's default for float32 operands on GPU is TF32.
    """
    return jnp.einsum(spec, left, right, precision="highest", preferred_element_type=jnp.float32)


def batched_product(left: Array, right: Array, *, transpose_right: bool = False) -> Array:
    """`left @ right` over two leading batch axes, with `contract`'s precision.

    Unlike `einsum` it never swaps its operands: rows of `left` stay rows of the result. On CPU that
    saves a transposition of every product over a few tree nodes.
    """
    contracting = ((3,), (3 if transpose_right else 2,))
    return lax.dot_general(
        left,
        right,
        (contracting, ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def best_of(
    values: Float[Array, "*rows V"], count: int | None = None
) -> tuple[Int32[Array, "*rows"], Float[Array, "*rows"]]:
    """The lowest index of the maximum of the first `count` values of each row, and the maximum.

    Two plain reductions, which XLA vectorises on CPU; `argmax` was three times slower there. The
    index of a NaN is unspecified.
    """
    values = values[..., :count]
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    largest = values.max(axis=-1, keepdims=True)
    # No value equals NaN: the index stays in range.
    candidates = jnp.where(values == largest, index, values.shape[-1] - 1)
    return candidates.min(axis=-1), largest[..., 0]


def few_best(
    values: Float[Array, "*rows V"], count: int
) -> tuple[Float[Array, "*rows count"], Int32[Array, "*rows count"]]:
    """As `lax.top_k`, which sorts all values on a TPU, but with two passes for each of the best.

    An index that belongs to minus infinity, or comes after a NaN, is unspecified.
    """
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    found = []
    for _ in range(count):
        best, largest = best_of(values)
        found.append((largest, best))
        values = jnp.where(index == best[..., None], -jnp.inf, values)
    largest, best = (jnp.stack(each, axis=-1) for each in zip(*found, strict=True))
    return largest, best


def sum_in_order(values: Array, axis: int = -1) -> Array:
    """The sum of a few values along an axis, which stays; from the first to the last.

    XLA chooses the order of its own sums by the number of rows.
    """
    return jnp.expand_dims(functools.reduce(operator.add, jnp.unstack(values, axis=axis)), axis)


def argsort(values: Array) -> Array:
    """The stable order of the last axis, int32 whatever the switches of jax say."""
    places = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return lax.sort((values, places), num_keys=1)[1]


def rounded(x: Array) -> Array:
    """A float32 product as its nearest number, whatever comes after it.

    A compiler turns a product and a sum after it into a multiply-add, in one program and not in
    another, and its result has other last bits. On a CPU it looks through an optimisation barrier
    and `lax.reduce_precision`, but not through a choice.
    """
    return jnp.where(jnp.isnan(x), jnp.nan, x)


def scaled(x: Any, multiplier: float) -> Any:
    """`multiplier * x` in the dtype of `x`, deferred or not; only the product is rounded to it."""
    if multiplier == 1.0:
        return x
    x = total(x)
    return rounded(x.astype(jnp.float32) * multiplier).astype(x.dtype)


ACTIVATIONS = ("silu", "gelu", "relu2")


def activate(name: str, x: Array) -> Array:
    """One of `ACTIVATIONS`, evaluated in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    match name:
        case "silu":
            wide = wide * jax.nn.sigmoid(wide)
        case "gelu":
            wide = jax.nn.gelu(wide, approximate=False)
        case "relu2":
            wide = jnp.square(jax.nn.relu(wide))
        case _:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {name!r}")
    return wide.astype(x.dtype)


def gated(name: str, rows: Array, multiplier: float = 1.0, limit: float | None = None) -> Array:
    """The first half of the columns, times `multiplier` and activated, times the second half.

    For the limit see `product_within`.
    """
    gate, up = jnp.split(rows, 2, axis=-1)
    return product_within(activate(name, scaled(gate, multiplier)), up, limit)


def product_within(gate: Array, up: Array, limit: float | None) -> Array:
    """`gate * up`, with a limit on the first one's value and the second one's size."""
    if limit is None:
        return gate * up
    return jnp.minimum(gate, limit) * jnp.clip(up, -limit, limit)


def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    """Root-mean-square norm of each row `[..., M]`, evaluated in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(variance + epsilon)
    return (normed * lax.broadcast_to_rank(scale.astype(jnp.float32), x.ndim)).astype(x.dtype)


class Deferred:
    """An array that a kernel computes while it loads, so that it takes no launch of its own.

    All other readers call `total`.
    """

    def total(self) -> Array:
        """The array."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums(Deferred):
    """A product as the sums of parts of its inputs, which its reader adds up.

    Attributes:
        parts: `[P, *rows, M]` float32, P a power of two.
        dtype: of the product.
    """

    parts: Array
    dtype: DTypeLike = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return self.parts.shape[1:]

    def total(self) -> Array:
        """The product."""
        return added_in_pairs(list(self.parts)).astype(self.dtype)


Product: TypeAlias = Array | PartialSums


def added_in_pairs(parts: Sequence[Array]) -> Array:
    """The sum of a power of two of parts, neighbours first: the one order for all readers."""
    sums = [*parts]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def total(product: Array | Deferred) -> Array:
    """An array that is not deferred: `totals`, for type checkers."""
    return totals(product)


def totals(tree: Any) -> Any:
    """A pytree whose arrays are not deferred; its other leaves stay what they are."""

    def is_deferred(node: Any) -> bool:
        return isinstance(node, Deferred)

    return jax.tree.map(
        lambda leaf: leaf.total() if is_deferred(leaf) else leaf, tree, is_leaf=is_deferred
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeferredRMSNorm:
    """A root-mean-square norm, or its product with a matrix, before the rows are scaled.

    All of the norm `rsqrt(mean(v * v) + epsilon) * v * weight` but the first factor is applied.
    That factor is one scalar per row and commutes with a matrix product, so the norm needs no pass
    of its own: one kernel writes `v * weight` and the squares, and the kernel after the product
    applies the factor.

    Attributes:
        value: `[..., M]`, `v * weight`, or a `Product` with it.
        mean_squares: `[..., parts]` float32; their sum is the mean square `mean(v * v)` of the row
            that is normed.
        epsilon: constant added to the mean square.
    """

    value: Any
    mean_squares: Array
    epsilon: float = static()

    def scaled(self) -> Array:
        """The scaled rows `[..., M]`, float32."""
        mean_square = sum_in_order(self.mean_squares)
        return total(self.value).astype(jnp.float32) * lax.rsqrt(mean_square + self.epsilon)

    def packed(self) -> Array:
        """Value and mean square `[..., M + 1]`, float32: one array, so one all-reduce sums both."""
        mean_square = jnp.sum(self.mean_squares, axis=-1, keepdims=True)
        return jnp.concatenate([self.value.astype(jnp.float32), mean_square], axis=-1)

    def unpacked(self, packed: Array, shards: int) -> "DeferredRMSNorm":
        """The norm of rows split over `shards` equal shards, from the sum of their `packed`."""
        value = packed[..., :-1].astype(self.value.dtype)
        return dataclasses.replace(self, value=value, mean_squares=packed[..., -1:] / shards)
