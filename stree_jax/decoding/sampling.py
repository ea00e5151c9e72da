"""From logits to probabilities and tokens. Draft and target go through the same functions.

Above temperature 0 a token is `argmax(log p + noise)` with Gumbel noise, which is a sample of p.
The noise belongs to a row and a position of its output, so the target draws the same token with and
without drafts. A draft model that adds the same noise to its own log-probabilities often draws that
token too (Daliri, Musco and Suresh, 2024, arXiv:2408.07978).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, log_softmax
from pallas_kernels.numerics import best_of, few_best, rounded
from stree_jax.array_types import Array, Bool, Float, Float32, Int, Key
from stree_jax.decoding.rules import per_row
from stree_jax.decoding.types import Sampling

# Folded into a row's key for its noise. Draws that belong to a step fold in the step's number.
_NOISE = 0x6E6F6973
# Best tokens that are searched one by one on a TPU; more are sorted.
_FEW = 16


@jax.named_scope("sampling")
def position_noise(
    keys: Key[Array, " B"], emitted: Int[Array, " B"], depth: int, vocab_size: int
) -> Float32[Array, "B _ V"]:
    """Gumbel noise of the `depth + 1` positions after `emitted` new tokens.

    Keys are the same in every step; entry d is for the token after a node of depth d.
    """

    def at(key: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, _NOISE)
    positions = emitted[:, None] + jnp.arange(depth + 1, dtype=jnp.int32)[None]
    return jax.vmap(jax.vmap(at, (None, 0)))(keys, positions)


@jax.named_scope("sampling")
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


@jax.named_scope("sampling")
def token_log_probs(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Normalised log-probabilities after temperature and filters; `-inf` for tokens left out.

    Args:
        logits: logits without vocabulary padding.
        sampling: sampling settings of each row; temperature 0 counts as 1.
    """
    return log_softmax(filtered_logits(logits, sampling))


def filtered_logits(
    logits: Float[Array, "B *rows V"], sampling: Sampling
) -> Float32[Array, "B *rows V"]:
    """Logits after temperature and filters, in their order; the best one is 0.

    `-inf` is for tokens left out. Temperature 0 counts as 1, which keeps the order.
    """
    # The best logit is 0 before the division, so no temperature overflows. A processor's logits may
    # be products, and a multiply-add would make it another number.
    scaled = rounded(logits) - best_token(logits)[1][..., None]
    temperature = per_row(sampling.temperature, logits)
    scaled = scaled / jnp.where(temperature > 0, temperature, 1.0)
    for keep in sampling.filters:
        scaled = keep(scaled)
    return scaled


def all_finite(logits: Float[Array, "*rows V"]) -> Bool[Array, "*rows"]:
    """True if logits are usable; False if any is NaN or +inf, or all are -inf.

    A single -inf rules a token out. Logits are without vocabulary padding, whose values are
    unspecified.
    """
    return jnp.isfinite(best_token(logits)[1])


@jax.named_scope("sampling")
def best_token(
    logits: Float[Array, "*rows V"],
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """`best_of` with NaN as infinity, because XLA's maximum ignores NaN on a CPU.

    Shared by all uses of the best token or its logit, so that XLA makes one pass for all of them.
    """
    return best_of(jnp.where(jnp.isnan(logits), jnp.inf, logits))


@jax.named_scope("sampling")
def best_tokens(
    scores: Float[Array, "*rows V"], count: int
) -> tuple[Float[Array, "*rows count"], Int[Array, "*rows count"]]:
    """The `count` best scores and their tokens, best first; those of score `-inf` are any."""
    if dispatch.on_tpu() and 0 < count <= _FEW:
        return few_best(scores, count)
    best, tokens = lax.top_k(scores, count)
    return best, tokens.astype(jnp.int32)
