"""`expert_mlps` with XLA's operations: loops on a CPU, products of many matrices elsewhere.

XLA copies gathered matrices on a CPU, and multiplies each row of a grouped product by all experts.
So there a loop takes one expert's matrices at a time, which for Granite-4-H-Tiny on 2 cores is 4
times as fast for one token, and 26 times for 512 (`benchmarks/experts.py`). On a GPU each turn of
such a loop would be several launches.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from pallas_kernels.autodiff import with_gradients_of
from pallas_kernels.numerics import activate, contract

_BLOCK = 8, 64  # rows that an expert's matrices are multiplied by at a time, least and most


def expert_mlps(x, weights, chosen, experts_in, experts_out, *, activation, gated):
    """See `api.expert_mlps`."""
    if not chosen.size:
        return x
    in_products, in_loops = (
        functools.partial(function, activation=activation, gated=gated)
        for function in (products, loops)
    )
    by_choice = lax.platform_dependent(
        *(x, chosen, experts_in, experts_out),
        cpu=with_gradients_of(in_products, in_loops),
        default=in_products,
    )
    return weighted_sum(by_choice, weights)


def few(chosen, num_experts: int) -> bool:
    """Whether each choice takes its expert's matrices, also where others have chosen it.

    On a GPU XLA fuses that with the product: it copies nothing, and takes four launches where the
    kernel with its sorting takes six.
    """
    return chosen.size <= num_experts


def products(x, chosen, experts_in, experts_out, **options):
    """What each choice gives `[n k, M]`, from products of many matrices at once."""
    run = _by_gathering if few(chosen, len(experts_in)) else _by_grouping
    return run(x, chosen, experts_in, experts_out, **options)


def loops(x, chosen, experts_in, experts_out, **options):
    """The same, one expert's matrices at a time."""
    run = _one_by_one if few(chosen, len(experts_in)) else _expert_by_expert
    return run(x, chosen, experts_in, experts_out, **options)


def by_expert(chosen):
    """The choices of all tokens `[n k]`, those of an expert one after the other."""
    return jnp.argsort(chosen.reshape(-1), stable=True)


def starts_of(chosen, num_experts: int):
    """Where those of each expert start in that order, and the end of the last, `[experts + 1]`."""
    before = chosen.reshape(-1) < jnp.arange(num_experts + 1)[:, None]
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def weighted_sum(by_choice, weights):
    """Each token adds what its choices gave `[n k, M]`, in the order of their rank."""
    wide = by_choice.reshape(*weights.shape, by_choice.shape[1]).astype(jnp.float32)
    return (wide * weights[..., None]).sum(axis=1).astype(by_choice.dtype)


def _mlp(rows, first: Callable, second: Callable, activation: str, gated: bool):
    """An MLP, given the products with its matrices."""
    hidden = first(rows)
    if gated:
        gate, up = jnp.split(hidden, 2, axis=-1)
        hidden = activate(activation, gate) * up
    else:
        hidden = activate(activation, hidden)
    return second(hidden)


def _by_gathering(x, chosen, experts_in, experts_out, **options):
    """Each choice takes the matrices of its expert."""

    def product_with(experts):
        own = experts[chosen.reshape(-1)]
        return lambda rows: contract("ni,nio->no", rows, own).astype(rows.dtype)

    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    return _mlp(rows, product_with(experts_in), product_with(experts_out), **options)


def _by_grouping(x, chosen, experts_in, experts_out, **options):
    """Choices are sorted by expert; an expert's are one block of a grouped product."""
    sizes = jnp.diff(starts_of(chosen, len(experts_in)))

    def product_with(experts):
        return lambda rows: lax.ragged_dot(
            rows,
            experts,
            sizes,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).astype(rows.dtype)

    order = by_expert(chosen)
    rows = x[order // chosen.shape[1]]
    y = _mlp(rows, product_with(experts_in), product_with(experts_out), **options)
    return y[jnp.argsort(order)]


def _product_with(experts, expert):
    """Product of rows with the matrix of one expert."""
    matrix = lax.dynamic_index_in_dim(experts, expert, keepdims=False)
    return lambda rows: contract("ni,io->no", rows, matrix).astype(rows.dtype)


def _one_by_one(x, chosen, experts_in, experts_out, **options):
    """A loop over choices."""

    def of_choice(choice_and_expert):
        choice, expert = choice_and_expert
        row = lax.dynamic_index_in_dim(x, choice // chosen.shape[1])
        products = (_product_with(experts, expert) for experts in (experts_in, experts_out))
        return _mlp(row, *products, **options)[0]

    return lax.map(of_choice, (jnp.arange(chosen.size), chosen.reshape(-1)))


def _expert_by_expert(x, chosen, experts_in, experts_out, **options):
    """A loop over experts, and one over blocks of the rows that have chosen an expert."""
    num_experts, num_choices = len(experts_in), chosen.size
    average = -(-num_choices // num_experts)
    least, most = _BLOCK
    size = min(most, max(least, 1 << (average - 1).bit_length()))
    order, starts = by_expert(chosen), starts_of(chosen, num_experts)

    def of_expert(expert, y):
        start, end = starts[expert], starts[expert + 1]

        def of_block(i, y):
            place = start + i * size + jnp.arange(size)
            choice = order[jnp.minimum(place, num_choices - 1)]
            products = (_product_with(experts, expert) for experts in (experts_in, experts_out))
            rows = _mlp(x[choice // chosen.shape[1]], *products, **options)
            return y.at[jnp.where(place < end, choice, num_choices)].set(rows, mode="drop")

        return lax.fori_loop(0, (end - start + size - 1) // size, of_block, y)

    nothing = jnp.zeros((num_choices, x.shape[1]), x.dtype)
    return lax.fori_loop(0, num_experts, of_expert, nothing)
