import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from pallas_kernels import dispatch
from stree_jax.decoding.sampling import all_finite, best_tokens, filtered_logits, token_log_probs
from stree_jax.decoding.types import Sampling
from stree_jax.models.layers import output_logits
from stree_jax.models.matrices import Matrix
from tests.helpers import as_users


def sampling_of(temperature, top_k, top_p):
    return Sampling(temperature, (st.TopK(top_k), st.TopP(top_p)))


def sampling(temperature=1.0, top_k=0, top_p=1.0):
    return sampling_of(jnp.full(1, temperature), jnp.full(1, top_k), jnp.full(1, top_p))


LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))


def test_filters_apply_in_their_order():
    """Of 4/9, 3/9 and 2/9 two reach 0.75; of 0.4, 0.3, 0.2 and 0.1 three do."""
    p, k = st.TopP(jnp.full(1, 0.75)), st.TopK(jnp.full(1, 3))
    first_k = token_log_probs(LOGITS[None], Sampling(jnp.ones(1), (k, p)))[0]
    first_p = token_log_probs(LOGITS[None], Sampling(jnp.ones(1), (p, k)))[0]
    assert_allclose(np.exp(first_k), [0, 4 / 7, 0, 3 / 7], atol=1e-6)
    assert_allclose(np.exp(first_p), [0, 4 / 9, 2 / 9, 3 / 9], atol=1e-6)


def kept_by_sorting(logits, temperature, top_k, top_p):
    """The definition: the best k and their ties, then the smallest set of them that reaches p."""
    scaled = (logits - logits.max()) / np.float32(temperature)
    best_first = -np.sort(-scaled.astype(np.float64))
    if top_k:
        best_first = best_first[best_first >= best_first[min(top_k, len(best_first)) - 1]]
    probs = np.exp(best_first) / np.exp(best_first).sum()
    before = np.cumsum(probs) - probs
    before[0] = -1.0  # the best token is always kept
    return scaled >= best_first[(before < top_p) | (top_p >= 1)][-1]


filters = jax.jit(filtered_logits)


@settings(max_examples=200)
@given(
    rows=some.lists(
        some.tuples(
            some.integers(0, 2**32 - 1),  # seed of the logits
            some.sampled_from([0.01, 0.3, 1.0, 3.0]),  # temperature
            some.sampled_from([0, 1, 2, 5, 8, 36, 37, 38, 2**30]),  # top-k
            some.one_of(some.sampled_from([0.0, 1e-6, 0.9, 1 - 1e-7, 1.0]), some.floats(0, 1)),
            some.booleans(),  # few different logits
        ),
        min_size=4,
        max_size=4,
    )
)
def test_selection_keeps_what_sorting_keeps(rows):
    """With ties, with a k beyond the vocabulary of 37, and with p at its ends."""
    rngs = [np.random.default_rng(seed) for seed, *_ in rows]
    logits = [rng.choice(5, 37) if few else 4 * rng.normal(size=37) for rng, (*_, few) in
              zip(rngs, rows, strict=True)]  # fmt: skip
    logits = np.array(logits, np.float32)
    columns = list(zip(*rows, strict=True))
    temperature, top_k = np.array(columns[1], np.float32), np.array(columns[2], np.int32)
    got = filters(logits, sampling_of(temperature, top_k, np.array(columns[3], np.float32)))
    got = np.isfinite(np.asarray(got))
    for row, (_, heat, k, p, _) in enumerate(rows):
        # Sums of float32 end a little earlier or later than sums of float64.
        least, most = (
            kept_by_sorting(logits[row], heat, k, p if p >= 1 else p * (1 + off))
            for off in (-1e-6, 1e-6)
        )
        assert (least <= got[row]).all(), rows[row]
        assert (got[row] <= most).all(), rows[row]


def test_the_best_logit_is_0_after_a_product():
    """By a model's factor, and by a processor. XLA computes it again for the difference."""
    rows = np.random.default_rng(0).normal(size=(64, 1, 32)).astype(np.float32)

    def best(rows):
        logits = output_logits(rows, Matrix(jnp.eye(32)), 0.37)
        filtered = filtered_logits(rows * 0.37, Sampling(jnp.ones(64), (st.MinP(jnp.ones(64)),)))
        return (logits - logits.max(-1, keepdims=True)).max(-1), filtered.max(-1)

    assert_array_equal(as_users(best)(rows), 0)


def test_nothing_is_sorted():
    assert "sort" not in str(jax.make_jaxpr(filtered_logits)(LOGITS[None], sampling()))


def test_a_row_of_nan_is_filtered_to_nothing_and_ends():
    rows = jnp.stack([LOGITS, LOGITS * jnp.nan])
    both = sampling_of(jnp.ones(2), jnp.full(2, 2), jnp.full(2, 0.9))
    got = filters(rows, both)
    assert_allclose(got[0], filters(rows[:1], sampling(top_k=2, top_p=0.9))[0])
    assert not np.isfinite(got[1]).any()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_one_bad_logit_is_found_wherever_it_is(value):
    """Compiled: there a maximum ignores NaN on a CPU."""
    places = np.arange(0, 4096, 61)
    rows = np.random.default_rng(0).normal(size=(len(places) + 1, 4096)).astype(np.float32)
    rows[np.arange(len(places)), places] = value
    assert jax.jit(all_finite)(rows).tolist() == [False] * len(places) + [True]


@pytest.mark.parametrize(
    ("on_tpu", "count", "sorts"), [(0, 3, 1), (1, 3, 0), (1, 0, 1), (1, 17, 1)]
)
def test_a_vocabulary_is_not_sorted_for_a_few_tokens_on_a_tpu(on_tpu, count, sorts, monkeypatch):
    monkeypatch.setattr(dispatch, "on_tpu", lambda: on_tpu)
    scores = jax.random.normal(jax.random.key(0), (2, 40))
    assert ("top_k" in str(jax.make_jaxpr(lambda x: best_tokens(x, count))(scores))) == sorts
    best, tokens = best_tokens(scores, count)
    assert_array_equal(best, -np.sort(-scores, axis=-1)[:, :count])
    assert_array_equal(np.take_along_axis(scores, tokens, axis=-1), best)
    assert tokens.dtype == jnp.int32
