"""From logits to probabilities and tokens. Draft and target go through the same functions.

Above temperature 0 a token is `argmax(log p + noise)` with Gumbel noise, which is a sample of p.
The noise belongs to a row and a position of its output, so the target draws the same token with and
without drafts. A draft model that adds the same noise to its own log-probabilities often draws that
token too (Daliri, Musco and Suresh, 2024, arXiv:2408.07978).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import best_of
from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.decoding.types import Sampling

# Folded into a row's key for its noise. Draws that belong to a step fold in the step's number.
_NOISE = 0x6E6F6973


def position_noise(
    keys: Key[Array, " B"], emitted: Int[Array, " B"], depth: int, vocab_size: int
) -> Float32[Array, "B _ V"]:
    """Gumbel noise of the next `depth + 1` output positions.

    Args:
        keys: of each row; the same in every step.
        emitted: new tokens of each row so far, which is its next position.
        depth: of the draft tree.
        vocab_size: V.

    Returns:
        `[B, depth + 1, V]`; entry d is for the token after a node of depth d.
    """

    def at(key: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,))

    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, _NOISE)
    positions = emitted[:, None] + jnp.arange(depth + 1)
    return jax.vmap(jax.vmap(at, (None, 0)))(keys, positions)


def sample_tokens(
    logits: Float[Array, "B N V"],
    noise: Float32[Array, "B _ V"],
    depth: Int[Array, "B N"],
    sampling: Sampling,
) -> Int[Array, "B N"]:
    """The token after each node, by the noise of its position.

    Args:
        logits: after each node, without vocabulary padding.
        noise: of `position_noise`.
        depth: of each node.
        sampling: temperatures must be above 0.
    """
    at_node = jnp.take_along_axis(noise, depth[..., None], axis=1)
    return best_of(filtered_logits(logits, sampling) + at_node)[0]


def token_log_probs(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Normalised log-probabilities: `filtered_logits`, of which it takes the arguments."""
    return jax.nn.log_softmax(filtered_logits(logits, sampling))


def filtered_logits(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Logits after temperature, top-k and top-p, in this order; the best one is 0.

    Args:
        logits: without vocabulary padding.
        sampling: of each row; temperatures must be above 0.

    Returns:
        `-inf` for tokens that are filtered out. Tokens that tie with the last one kept are kept
        too.
    """
    per_row = (slice(None),) + (None,) * (logits.ndim - 1)
    # The best logit is 0 before the division, so no temperature overflows.
    scaled = logits - logits.max(axis=-1, keepdims=True)
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
    return scaled


def all_finite(logits: Float[Array, "*rows V"]) -> Bool[Array, "*rows"]:
    """Whether the best logit is finite: False if any is NaN or +inf, or all are -inf."""
    return jnp.isfinite(logits.max(axis=-1))
