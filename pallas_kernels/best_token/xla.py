"""`best_token` from logits, with XLA's own matrix product."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.numerics import contract


class Best(NamedTuple):
    """The best token of each row.

    Attributes:
        token: its id; the lowest among equals.
        logit: its logit; not finite if a logit of the row is NaN or +inf, or all are -inf, and then
            the token means nothing. (Of a float32 head the kernel takes a logit of -inf for NaN.)
    """

    token: Int32[Array, "*rows"]
    logit: Float32[Array, "*rows"]


def best_token(hidden, head, vocab_size, multiplier):
    """See `api.best_token`."""
    return best_of(contract("...m,vm->...v", hidden, head) * multiplier, vocab_size)


def best_of(logits: Float[Array, "*rows W"], vocab_size: int) -> Best:
    """The best of the first `vocab_size` logits of each row.

    Two plain reductions, which XLA vectorises on CPU; `argmax` itself was three times slower there.
    """
    logits = logits[..., :vocab_size]
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    largest = logits.max(axis=-1, keepdims=True)
    best = jnp.where(logits == largest, ids, vocab_size - 1)
    return Best(best.min(axis=-1), largest[..., 0])
