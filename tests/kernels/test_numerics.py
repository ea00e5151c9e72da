"""Shared numerics."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.numerics import best_of


def test_the_best_of_logits():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0, 9.0], [-jnp.inf, -jnp.inf, -5.0, -jnp.inf, 9.0]])
    token, logit = best_of(logits, 4)
    assert token.dtype == jnp.int32
    assert token.tolist() == [1, 2]
    assert logit.tolist() == [2.0, -5.0]
    assert best_of(logits)[0].tolist() == [4, 4]


def test_the_best_of_what_is_not_finite():
    logits = jnp.array([[0.0, jnp.nan, 2.0], [-jnp.inf] * 3, [0.0, jnp.inf, jnp.inf]])
    token, logit = best_of(logits)
    np.testing.assert_array_equal(logit, [jnp.nan, -jnp.inf, jnp.inf])
    assert token.tolist() == [2, 0, 1]
