"""Filters: which tokens may be sampled. Draft and target go through the same ones.

A filter is a rule without a state that comes after temperature.
"""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax

from pallas_kernels import largest_threshold
from stree_jax.array_types import Array, Float32
from stree_jax.checks import check_int, is_number, require
from stree_jax.decoding.rules import Rule, is_given, per_row, rule
from stree_jax.messages import shown


@runtime_checkable
class Filter(Protocol):
    """A filter as a function of logits: `generate(filters=...)` makes a `Rule` of it."""

    def __call__(self, logits: Float32[Array, "B *rows V"], /) -> Float32[Array, "B *rows V"]:
        """See `Rule.apply`."""


@rule
class TopK(Rule):
    """Keeps the k best tokens, and those that tie with the last of them.

    Attributes:
        k: 0 keeps all tokens.
    """

    k: int

    def __post_init__(self):
        if is_given(self.k):
            check_int("top_k", self.k, 0)

    def apply(self, logits, state, /):
        k = per_row(self.k, logits)
        return lax.cond((k > 0).any(), lambda: _best_k(logits, k), lambda: logits)


@rule
class TopP(Rule):
    """Keeps the smallest set of tokens with probability p, and those that tie with its last one.

    Probabilities are those after the filters before this one.

    Attributes:
        p: 1 keeps all tokens.
    """

    p: float

    def __post_init__(self):
        if is_given(self.p):
            check_top_p(self.p)

    def apply(self, logits, state, /):
        p = per_row(self.p, logits)
        # The set is the tokens above a threshold, whose weight falls as the threshold rises. The
        # best token's weight is 1.
        weights = jnp.where(jnp.isfinite(logits), jnp.exp(logits), 0.0)
        # Rows that keep all tokens have nothing to search for.
        least = jnp.where(p >= 1, jnp.inf, p)
        threshold = largest_threshold(weights, weights, least, is_share=True)
        kept = (p >= 1) | (weights >= jnp.fmin(threshold, 1.0))
        return jnp.where(kept, logits, -jnp.inf)


@rule
class MinP(Rule):
    """Keeps tokens at least p times as probable as the best one (Nguyen et al., 2024).

    Attributes:
        p: 0 keeps all tokens, 1 the best one.
    """

    p: float

    def __post_init__(self):
        if is_given(self.p):
            check_min_p(self.p)

    def apply(self, logits, state, /):
        return jnp.where(jnp.exp(logits) >= per_row(self.p, logits), logits, -jnp.inf)


def check_top_p(p: Any) -> None:
    """Refuses an invalid `TopP.p`."""
    require(is_number(p) and 0 < p <= 1, f"top_p must be in (0, 1], got {shown(p)}")


def check_min_p(p: Any) -> None:
    """Refuses an invalid `MinP.p`."""
    require(is_number(p) and 0 <= p <= 1, f"min_p must be from 0 to 1, got {shown(p)}")


def _best_k(logits: Array, k: Array) -> Array:
    below = jnp.abs(logits)  # the best is 0
    num_tokens = logits.shape[-1]
    # At the worst token kept, and from there on, are all tokens but k - 1 or fewer.
    least = num_tokens - jnp.minimum(k, num_tokens) + 1
    threshold = largest_threshold(below, None, least.astype(jnp.float32))
    return jnp.where((k <= 0) | (below <= threshold), logits, -jnp.inf)
