import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.decoding.sampling import all_finite, token_log_probs
from stree_jax.decoding.state import Sampling


def sampling(temperature=1.0, top_k=0, top_p=1.0):
    return Sampling(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))


LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3, 1e9]))  # the last is vocabulary padding


def probs(*, filtered=True, **options):
    log_probs = token_log_probs(LOGITS, sampling(**options), vocab_size=4, filtered=filtered)
    return np.exp(log_probs)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),  # of the top 3: 4/9, 3/9, 2/9
        ({"temperature": 0.5}, np.array([1, 16, 4, 9]) / 30),
    ],
)
def test_filters(options, want):
    np.testing.assert_allclose(probs(**options), want, atol=1e-6)


def test_without_filters_the_sort_is_skipped():
    np.testing.assert_allclose(probs(filtered=False), [0.1, 0.4, 0.2, 0.3], atol=1e-6)


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        ([0.0, -np.inf, 1.0, 0.0, np.nan], True),  # padding does not count
        ([0.0, np.nan, 1.0, 0.0, 0.0], False),
        ([0.0, np.inf, 1.0, 0.0, 0.0], False),
        ([-np.inf] * 4 + [0.0], False),
    ],
)
def test_all_finite(row, finite):
    assert bool(all_finite(jnp.array(row), 4)) is finite
