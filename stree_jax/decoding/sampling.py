"""From logits to probabilities and tokens. Draft and target go through the same functions."""

import jax
import jax.numpy as jnp

from stree_jax.array_types import Array, Float
from stree_jax.decoding.state import Sampling


def token_log_probs(
    logits: Float[Array, "*rows W"], sampling: Sampling, *, vocab_size: int, filtered: bool
) -> Float[Array, "*rows V"]:
    """Log-probabilities after temperature, top-k and top-p, in this order.

    Args:
        logits: `W >= V`; the rest is vocabulary padding, which has no probability.
        sampling: temperature above 0.
        vocab_size: `V`.
        filtered: False skips the sort that top-k and top-p need.

    Returns:
        Normalised; `-inf` where filtered out. Tokens that tie with the last one kept are kept too.
    """
    logits = logits[..., :vocab_size]
    # The best is 0 before the division, so that no temperature makes it overflow.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    if filtered:
        descending = -jnp.sort(-scaled, axis=-1)
        rank = jnp.arange(vocab_size)
        kept = (sampling.top_k <= 0) | (rank < sampling.top_k)
        # Of those, the fewest whose probability reaches top_p: all whose predecessors do not.
        probs = jax.nn.softmax(jnp.where(kept, descending, -jnp.inf))
        kept &= (jnp.cumsum(probs, axis=-1) - probs < sampling.top_p) | (rank == 0)
        lowest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled >= lowest, scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled)


def all_finite(logits: Float[Array, "*rows W"], vocab_size: int) -> Array:
    """Whether the best logit is finite: False if any is NaN or +inf, or all are -inf. `[*rows]`."""
    return jnp.isfinite(logits[..., :vocab_size].max(axis=-1))
