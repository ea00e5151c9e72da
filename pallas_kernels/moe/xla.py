"""`expert_mlps` as XLA operations: loops on a CPU, batched products on a GPU, either on a TPU.

On a CPU XLA copies gathered matrices, and multiplies every row of a grouped product by all experts.
A loop does neither: for Granite-4-H-Tiny on 2 cores it is 4 times as fast for one token and 26
times for 512 (`docs/results.md`). On a GPU each iteration would be several launches. On a TPU XLA
copies the matrices of all experts before it gathers, and multiplies every row by all experts too:
for few rows of each that takes less time than a loop.

A choice is a pair of a token and one of its experts. Choices are numbered `A * token + rank`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import numerics
from pallas_kernels.dispatch import with_gradients_of
from pallas_kernels.matmul import PackedMatrix, matmul
from pallas_kernels.moe import native
from pallas_kernels.numerics import activate, argsort, contract, rounded, sum_in_order

# Least and most rows that a loop multiplies by an expert's matrices at a time.
_BLOCK = 8, 256

Multiply = Callable[[Array, Any], Array]  # rows by the matrices of their experts


def expert_mlps(
    x: Array, weights: Array, chosen: Array, experts_in: Array, experts_out: Array, **options: Any
) -> Array:
    """See `api.expert_mlps`."""
    if not chosen.size:
        return x
    loops: tuple[Callable[..., Array], ...] = (_loop_over_blocks, _loop_over_blocks)
    if few(chosen, len(experts_in)):
        # Two copies of a row: XLA multiplies a single one on a TPU's vector unit.
        loops = _loop_over_choices, functools.partial(_loop_over_choices, copies=2)
    elif _average(chosen, len(experts_in)) < _BLOCK[0]:
        loops = _loop_over_blocks, products
    in_products, on_cpu, on_tpu = (
        functools.partial(function, **options) for function in (products, *loops)
    )
    by_choice = lax.platform_dependent(
        *(x, chosen, experts_in, experts_out),
        cpu=with_gradients_of(in_products, on_cpu),
        tpu=with_gradients_of(in_products, on_tpu),
        default=in_products,
    )
    return weighted_sum(by_choice, weights)


def packed_mlps(
    x: Float[Array, "tokens M"],
    weights: Float32[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    experts_in: PackedMatrix,
    experts_out: PackedMatrix,
    *,
    product: str,
    **options: Any,
) -> Float[Array, "tokens M"]:
    """`expert_mlps` with packed experts: each choice is a row with a matrix of its own."""

    def of_choices(rows: Array, experts: PackedMatrix) -> Array:
        return matmul(rows, experts, chosen.reshape(-1), implementation=product)

    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    by_choice = _mlp(rows, experts_in, experts_out, of_choices, **options)
    total = native.weighted_sum if product == "native" else weighted_sum
    return total(by_choice, weights).astype(x.dtype)


def few(chosen: Int[Array, "tokens A"], num_experts: int) -> bool:
    """True if each choice gathers its expert's matrices, even if others have the same expert.

    On a GPU XLA fuses the gather with the product: it copies nothing and takes four launches, where
    the kernel with its sorting takes six.
    """
    return chosen.size <= num_experts


def products(
    x: Array, chosen: Array, experts_in: Array, experts_out: Array, **options: Any
) -> Float[Array, "choices M"]:
    """The output of each choice, from batched products."""
    run = _by_gathering if few(chosen, len(experts_in)) else _by_grouping
    return run(x, chosen, experts_in, experts_out, **options)


def by_expert(chosen: Int[Array, "tokens A"]) -> Int[Array, " choices"]:
    """The choices of all tokens, sorted by expert."""
    return argsort(chosen.reshape(-1))


def starts_of(chosen: Int[Array, "tokens A"], num_experts: int) -> Int[Array, " starts"]:
    """Where the choices of each expert start in that order, and their end `[experts + 1]`."""
    before = chosen.reshape(1, -1) < jnp.arange(num_experts + 1, dtype=jnp.int32)[:, None]
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def weighted_sum(
    by_choice: Float[Array, "choices M"], weights: Float32[Array, "tokens A"]
) -> Float[Array, "tokens M"]:
    """The sum over each token's choices, in the order of their rank."""
    wide = by_choice.reshape(*weights.shape, by_choice.shape[1]).astype(jnp.float32)
    products = rounded(wide * weights[..., None])
    return sum_in_order(products, axis=1)[:, 0].astype(by_choice.dtype)


def _mlp(
    rows: Array,
    experts_in: Any,
    experts_out: Any,
    product: Multiply,
    activation: str,
    gated: bool,
    limit: float | None = None,
) -> Array:
    """An MLP of each row, by a product with the matrices of its expert."""
    hidden = product(rows, experts_in)
    if gated:
        hidden = numerics.gated(activation, hidden, limit=limit)
    else:
        hidden = activate(activation, hidden)
    return product(hidden, experts_out)


def _by_gathering(
    x: Array, chosen: Array, experts_in: Array, experts_out: Array, **options: Any
) -> Array:
    """Each choice gathers the matrices of its expert."""

    def product(rows: Array, experts: Array) -> Array:
        return contract("ni,nio->no", rows, experts[chosen.reshape(-1)]).astype(rows.dtype)

    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    return _mlp(rows, experts_in, experts_out, product, **options)


def _by_grouping(
    x: Array, chosen: Array, experts_in: Array, experts_out: Array, **options: Any
) -> Array:
    """Choices are sorted by expert; each expert's are one block of a grouped product."""
    sizes = jnp.diff(starts_of(chosen, len(experts_in)))

    def product(rows: Array, experts: Array) -> Array:
        return lax.ragged_dot(
            rows,
            experts,
            sizes,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).astype(rows.dtype)

    order = by_expert(chosen)
    rows = x[order // chosen.shape[1]]
    return _mlp(rows, experts_in, experts_out, product, **options)[argsort(order)]


def _product_of(expert: Array) -> Multiply:
    """The product of rows with the matrix of one expert."""

    def product(rows: Array, experts: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(experts, expert, keepdims=False)
        return contract("ni,io->no", rows, matrix).astype(rows.dtype)

    return product


def _loop_over_choices(*arrays: Array, copies: int = 1, **options: Any) -> Array:
    x, chosen, experts_in, experts_out = arrays

    def of_choice(choice_and_expert: tuple[Array, Array]) -> Array:
        choice, expert = choice_and_expert
        row = lax.dynamic_index_in_dim(x, choice // chosen.shape[1])
        rows = jnp.repeat(row, copies, axis=0)
        return _mlp(rows, experts_in, experts_out, _product_of(expert), **options)[0]

    return lax.map(of_choice, (jnp.arange(chosen.size, dtype=jnp.int32), chosen.reshape(-1)))


def _loop_over_blocks(
    x: Array, chosen: Array, experts_in: Array, experts_out: Array, **options: Any
) -> Array:
    """A loop over blocks of rows that have chosen one expert; each expert has what it needs."""
    num_experts, num_choices = len(experts_in), chosen.size
    least, most = _BLOCK
    size = min(most, max(least, 1 << (_average(chosen, num_experts) - 1).bit_length()))
    order, starts = by_expert(chosen), starts_of(chosen, num_experts)
    ends = lax.cumsum((jnp.diff(starts) + size - 1) // size)  # of each expert's blocks
    firsts = jnp.pad(ends[:-1], (1, 0))

    def of_block(i: Array, y: Array) -> Array:
        expert = jnp.sum(ends <= i, dtype=jnp.int32)
        place = starts[expert] + (i - firsts[expert]) * size + jnp.arange(size, dtype=jnp.int32)
        choice = order[jnp.minimum(place, num_choices - 1)]
        rows, product = x[choice // chosen.shape[1]], _product_of(expert)
        rows = _mlp(rows, experts_in, experts_out, product, **options)
        is_here = place < starts[expert + 1]
        return y.at[jnp.where(is_here, choice, num_choices)].set(rows, mode="drop")

    nothing = jnp.zeros((num_choices, x.shape[1]), x.dtype)
    return lax.fori_loop(0, ends[-1], of_block, nothing)


def _average(chosen: Int[Array, "tokens A"], num_experts: int) -> int:
    """Rows that choose an expert."""
    return -(-chosen.size // num_experts)
