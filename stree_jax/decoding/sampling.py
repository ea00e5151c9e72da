"""From logits to probabilities and tokens. Draft and target go through the same functions.

Above temperature 0 a token is `argmax(log p + noise)` with Gumbel noise, which is a sample of p.
The noise belongs to a row and a position of its output, so the target draws the same token with and
without drafts. A draft model that adds the same noise to its own log-probabilities often draws that
token too (Daliri, Musco and Suresh, 2024, arXiv:2408.07978).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

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
        keys: one key per row, the same in every step.
        emitted: number of new tokens of each row so far, which is its next position.
        depth: depth of the draft tree.
        vocab_size: the number of tokens, V.

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
    """Samples the token after each node with the noise of its position.

    Args:
        logits: logits at each node, without vocabulary padding.
        noise: the noise that `Drafter.propose` and `Verifier.verify` get.
        depth: depth of each node, such as `draft.tree.depth`.
        sampling: sampling settings of each row; the noise of rows at temperature 0 must be 0.
    """
    at_node = jnp.take_along_axis(noise, depth[..., None], axis=1)
    return best_of(filtered_logits(logits, sampling) + at_node)[0]


def token_log_probs(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Normalised log-probabilities after temperature, top-k and top-p; `-inf` for tokens left out.

    Args:
        logits: logits without vocabulary padding.
        sampling: sampling settings of each row; temperature 0 counts as 1.
    """
    return jax.nn.log_softmax(filtered_logits(logits, sampling))


def filtered_logits(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Logits after temperature, top-k and top-p, in this order; the best one is 0.

    Args:
        logits: logits without vocabulary padding.
        sampling: sampling settings of each row; temperature 0 counts as 1, which keeps the order.

    Returns:
        `-inf` for tokens that are filtered out. Tokens that tie with the last one kept are kept
        too: with the same logit for top-k, with the same float32 probability for top-p.
    """
    per_row = (slice(None),) + (None,) * (logits.ndim - 1)
    # The best logit is 0 before the division, so no temperature overflows.
    scaled = logits - best_token(logits)[1][..., None]
    temperature = sampling.temperature[per_row]
    scaled = scaled / jnp.where(temperature > 0, temperature, 1.0)
    if not sampling.use_top_k_or_top_p:
        return scaled
    top_k, top_p = sampling.top_k[per_row], sampling.top_p[per_row]
    weights = jnp.exp(scaled)
    scaled, total = lax.cond(
        (sampling.top_k > 0).any(),
        lambda: _best_k(scaled, weights, top_k),
        lambda: (scaled, weights.sum(axis=-1, keepdims=True)),
    )
    # The smallest set that reaches top_p, without sorting: it is the tokens above a threshold, and
    # their weight falls as the threshold rises. The best token's weight is 1.
    weights = jnp.where(jnp.isfinite(scaled), weights, 0.0)
    threshold = _largest(
        lambda low: _sum_from(low, weights, weights) >= top_p * total,
        logits.shape[:-1],
    )
    kept = (top_p >= 1) | (weights >= jnp.fmin(threshold, 1.0))
    return jnp.where(kept, scaled, -jnp.inf)


def _best_k(scaled: Array, weights: Array, top_k: Array) -> tuple[Array, Array]:
    """`scaled` restricted to the best k tokens and ties, and the total weight of the best k."""
    below = jnp.abs(scaled)  # the best is 0
    num_tokens = scaled.shape[-1]
    # At the worst token kept, and from there on, are all tokens but k - 1 or fewer.
    threshold = _largest(
        lambda low: (
            _sum_from(low, below, jnp.int32(1)) > num_tokens - jnp.minimum(top_k, num_tokens)
        ),
        scaled.shape[:-1],
    )
    kept = (top_k <= 0) | (below <= threshold)
    lowest = jnp.where(kept, weights, jnp.inf).min(axis=-1, keepdims=True)
    ties = jnp.where(top_k <= 0, 0, kept.sum(axis=-1, keepdims=True) - top_k)
    total = jnp.where(kept, weights, 0.0).sum(axis=-1, keepdims=True)
    return jnp.where(kept, scaled, -jnp.inf), total - jnp.maximum(ties, 0) * lowest


def _sum_from(thresholds: Array, values: Array, summands: Array) -> Array:
    """For each threshold, the sum of the summands whose values are at least the threshold."""
    chosen = values[..., None, :] >= thresholds[..., None]
    return jnp.where(chosen, summands[..., None, :] if summands.ndim else summands, 0).sum(axis=-1)


def _largest(holds: Callable[[Array], Array], rows: tuple[int, ...]) -> Array:
    """The largest non-negative float that passes a test which all smaller ones pass too.

    Non-negative floats are ordered as their bits are, so this searches for the bits.

    Args:
        holds: the test, for several thresholds per row.
        rows: shape of the rows.

    Returns:
        A threshold per row, with one more axis of size 1.
    """

    def search(num_bits: int) -> Array:
        """Searches `num_bits` bits per pass."""

        def find(i: Array, bits: Array) -> Array:
            shift = jnp.maximum(31 - num_bits * (i + 1), 0)
            tried = bits + (jnp.arange(1, 2**num_bits, dtype=jnp.int32) << shift)
            passed = holds(lax.bitcast_convert_type(tried, jnp.float32))
            return bits + (passed.sum(axis=-1, keepdims=True, dtype=jnp.int32) << shift)

        none = jnp.zeros((*rows, 1), jnp.int32)
        return lax.fori_loop(0, -(-31 // num_bits), find, none)

    # A pass over the vocabulary is a launch on a GPU, and arithmetic on a CPU.
    bits = lax.platform_dependent(cpu=lambda: search(1), default=lambda: search(5))
    return lax.bitcast_convert_type(bits, jnp.float32)


def all_finite(logits: Float[Array, "*rows V"]) -> Bool[Array, "*rows"]:
    """Whether these logits are usable: False if any is NaN or +inf, or all are -inf.

    A single -inf rules a token out. Logits are without vocabulary padding, whose values are
    unspecified.
    """
    return jnp.isfinite(best_token(logits)[1])


def best_token(
    logits: Float[Array, "*rows V"],
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """`best_of` with NaN as infinity, because XLA's maximum ignores NaN on a CPU.

    Shared by all uses of the best token or its logit, so that XLA makes one pass for all of them.
    """
    return best_of(jnp.where(jnp.isnan(logits), jnp.inf, logits))
