"""From logits to probabilities and tokens. Draft and target go through the same functions."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import best_of
from stree_jax.array_types import Array, Bool, Float, Float32, Int
from stree_jax.decoding.types import Sampling


def token_log_probs(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Log-probabilities after temperature, top-k and top-p, in this order.

    Args:
        logits: without vocabulary padding.
        sampling: of each row; temperatures must be above 0.

    Returns:
        Normalised log-probabilities, `-inf` for tokens that are filtered out. Tokens that tie with
        the last one kept are kept too.
    """
    per_row = (slice(None),) + (None,) * (logits.ndim - 1)
    # The best logit is 0 before the division, so no temperature overflows.
    scaled = logits - best_token(logits)[1][..., None]
    scaled = scaled / sampling.temperature[per_row]
    if sampling.use_top_k_or_top_p:
        top_k, top_p = sampling.top_k[per_row], sampling.top_p[per_row]
        descending = -jnp.sort(-scaled, axis=-1)
        rank = jnp.arange(logits.shape[-1])
        kept = (top_k <= 0) | (rank < top_k)
        # The smallest set that reaches top_p: tokens whose predecessors do not reach it.
        probs = jax.nn.softmax(jnp.where(kept, descending, -jnp.inf))
        kept &= (jnp.cumsum(probs, axis=-1) - probs < top_p) | (rank == 0)
        lowest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled >= lowest, scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled)


def all_finite(logits: Float[Array, "*rows V"]) -> Bool[Array, "*rows"]:
    """Whether a token can be chosen by these logits: False if any is NaN or +inf, or all are -inf.

    A token with -inf among others is one that the model rules out. Logits are without vocabulary
    padding, whose values mean nothing.
    """
    return jnp.isfinite(best_token(logits)[1])


def best_token(
    logits: Float[Array, "*rows V"],
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """`best_of` with NaN as infinity, because XLA's maximum ignores NaN on a CPU.

    What needs the best token or its logit calls this: XLA then has one pass for it and the guard.
    """
    return best_of(jnp.where(jnp.isnan(logits), jnp.inf, logits))
