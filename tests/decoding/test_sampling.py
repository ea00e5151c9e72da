import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.decoding.sampling import all_finite, token_log_probs
from stree_jax.decoding.types import Sampling


def sampling(temperature=1.0, top_k=0, top_p=1.0, *, use_top_k_or_top_p=True):
    rows = (jnp.full(1, temperature), jnp.full(1, top_k), jnp.full(1, top_p))
    return Sampling(*rows, use_top_k_or_top_p=use_top_k_or_top_p)


LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))


def probs(**options):
    return np.exp(token_log_probs(LOGITS[None], sampling(**options)))[0]


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
    np.testing.assert_allclose(probs(use_top_k_or_top_p=False), [0.1, 0.4, 0.2, 0.3], atol=1e-6)


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        ([0.0, -np.inf, 1.0, 0.0], True),
        ([0.0, np.nan, 1.0, 0.0], False),
        ([0.0, np.inf, 1.0, 0.0], False),
        ([-np.inf] * 4, False),
    ],
)
def test_all_finite(row, finite):
    assert bool(all_finite(jnp.array(row))) is finite


def test_rows_have_their_own_temperature_and_filters():
    rows = [dict(temperature=0.5), dict(top_k=2), dict(top_p=0.4), {}]
    arrays = [
        jnp.array([row.get(name, default) for row in rows])
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0))
    ]
    nodes = jnp.stack([LOGITS, LOGITS[::-1]])
    together = token_log_probs(jnp.stack([nodes] * len(rows)), Sampling(*arrays))
    for row, options in enumerate(rows):
        alone = token_log_probs(nodes[None], sampling(**options))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_one_bad_logit_is_found_wherever_it_is(value):
    """Compiled: there a maximum ignores NaN on a CPU."""
    places = np.arange(0, 4096, 61)
    rows = np.random.default_rng(0).normal(size=(len(places) + 1, 4096)).astype(np.float32)
    rows[np.arange(len(places)), places] = value
    assert jax.jit(all_finite)(rows).tolist() == [False] * len(places) + [True]
