"""Filters give the distributions of transformers; processors: tests/decoding/test_rules.py."""

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import filters_of
from stree_jax.decoding.sampling import token_log_probs
from stree_jax.decoding.types import Sampling
from tests.convert import checkpoints

SIZE = 64


@pytest.mark.parametrize(
    "row",
    [
        st.Options(min_p=0.1),
        st.Options(min_p=1.0),
        st.Options(top_k=20, min_p=0.02),
        st.Options(top_k=30, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_distributions(row):
    checkpoints.transformers()
    from transformers.generation import logits_process

    logits = np.random.default_rng(1).normal(size=(5, SIZE)).astype(np.float32) * 2
    warpers = [logits_process.TemperatureLogitsWarper(0.8)]
    if row.top_k:
        warpers.append(logits_process.TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(row.top_p))
    warpers.append(logits_process.MinPLogitsWarper(row.min_p))
    warped = checkpoints.torch().tensor(logits)
    for warper in warpers:
        warped = warper(None, warped)
    want = warped.softmax(dim=-1).numpy()
    sampling = Sampling(jnp.full(5, 0.8), filters_of([row] * 5))
    got = np.exp(np.asarray(token_log_probs(jnp.asarray(logits)[:, None], sampling)))[:, 0]
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert ((want > 0).sum(axis=-1) < SIZE).all()
