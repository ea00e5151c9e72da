"""Experts and shared numerics, beyond their tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, expert_mlps
from pallas_kernels.numerics import best_of
from tests.cases import moe


def test_few_tokens_are_xlas_unless_asked_for(monkeypatch):
    monkeypatch.setattr(dispatch, "device_obstacle", lambda: None)  # as on a GPU

    def num_kernels(case, implementation=None):
        options = dict(activation=case.activation, gated=case.gated)
        run = functools.partial(expert_mlps, **options, implementation=implementation)
        return str(jax.make_jaxpr(run)(*moe.on_device(case))).count("pallas_call")

    assert num_kernels(moe.FEW) == 0
    assert num_kernels(moe.FEW, "pallas") == num_kernels(moe.MANY) == 2


def test_the_best_of_logits():
    """The first of equal ones, of the first columns; what is not finite is no mistake."""
    least, most = -jnp.inf, jnp.inf
    logits = jnp.array([[0.0, 2, 2, 1, 9], [least, least, -5, least, 9], [0, jnp.nan, 2, 1, 9]])
    token, logit = best_of(logits, 4)
    assert token.dtype == jnp.int32
    np.testing.assert_array_equal(logit, [2.0, -5.0, jnp.nan])
    assert token.tolist() == [1, 2, 3]
    token, logit = best_of(jnp.array([[1.0, 2, 3], [least] * 3, [0, most, most]]))
    np.testing.assert_array_equal(logit, [3.0, least, most])
    assert token.tolist() == [2, 0, 1]
