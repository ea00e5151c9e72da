"""`expert_mlps` by gathered matrices for few tokens, by grouped products for many.

Few: each token takes the matrices of its experts. Many: tokens are sorted by expert, so that an
expert's are one block of a grouped product. (XLA multiplies such a block by all experts, which is
slow for many of them.)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import activate, contract


def expert_mlps(x, weights, chosen, experts_in, experts_out, *, activation, gated):
    """See `api.expert_mlps`."""
    num_experts, num_active = len(experts_in), chosen.shape[1]

    def mlp(rows, product: Callable[[jax.Array, jax.Array], jax.Array]):
        hidden = product(rows, experts_in)
        if gated:
            gate, up = jnp.split(hidden, 2, axis=-1)
            hidden = activate(activation, gate) * up
        else:
            hidden = activate(activation, hidden)
        return product(hidden, experts_out)

    if chosen.size <= num_experts:

        def of_rows(rows, experts):
            own = experts[chosen.reshape(-1)]
            return contract("ni,nio->no", rows, own).astype(rows.dtype)

        by_choice = mlp(jnp.repeat(x, num_active, axis=0), of_rows)
    else:
        sizes = jnp.bincount(chosen.reshape(-1), length=num_experts).astype(jnp.int32)

        def of_groups(rows, experts):
            return lax.ragged_dot(
                rows,
                experts,
                sizes,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            ).astype(rows.dtype)

        order = by_expert(chosen)
        by_choice = mlp(x[order // num_active], of_groups)[jnp.argsort(order)]
    return weighted_sum(by_choice, weights)


def by_expert(chosen):
    """The choices of all tokens `[n k]`, those of an expert one after the other."""
    return jnp.argsort(chosen.reshape(-1), stable=True)


def weighted_sum(by_choice, weights):
    """Each token adds its experts in the order of their rank."""
    wide = by_choice.reshape(*weights.shape, by_choice.shape[1]).astype(jnp.float32)
    return (wide * weights[..., None]).sum(axis=1).astype(by_choice.dtype)
