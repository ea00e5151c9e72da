"""Log-probabilities of given texts, against an independent model in float64."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.testing import random_model, tiny_model
from tests import oracle

TEXTS = [[5, 9, 2, 30, 11, 7, 7], [3], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [36, 0]]


def float64(model, text):
    return oracle.log_probs(model, text)[np.arange(len(text) - 1), text[1:]]


@pytest.mark.parametrize(
    ("family", "rows"),
    [("groups", 3), pytest.param("mamba2attn hybrid", 8, marks=pytest.mark.thorough)],
)
def test_scores_are_the_models_own(family, rows):
    """`groups` has padded rows of the embedding; three rows a time leave one for a second call."""
    model = tiny_model(family)
    scores = st.score(model, TEXTS, rows=rows)
    for text, got in zip(TEXTS, scores, strict=True):
        assert got.shape == (len(text) - 1,)
        np.testing.assert_allclose(got, float64(model, text), atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1), (2, 0), (0, 3), (0, 0)])
def test_texts_without_a_token_to_score(shape):
    """No log-probabilities, and no gradient."""
    model, tokens = tiny_model(), jnp.zeros(shape, jnp.int32)
    got, gradient = nnx.value_and_grad(lambda model: st.text_log_probs(model, tokens).sum())(model)
    assert st.text_log_probs(model, tokens).shape == (shape[0], max(shape[1] - 1, 0))
    assert not any(leaf.any() for leaf in jax.tree.leaves((got, gradient)))


@pytest.mark.thorough
def test_in_chunks_of_places_and_of_the_vocabulary(monkeypatch):
    """Chunks of 16 places, of which logits exist for 4 at a time."""
    model, rng = tiny_model("mamba2attn hybrid"), np.random.default_rng(0)
    texts = [rng.integers(37, size=n).tolist() for n in (70, 33, 17, 2)]
    for module, name, value in (
        ("text.prefill", "PREFILL_CHUNK", 16),
        ("score", "PREFILL_CHUNK", 16),
        ("score", "_MOST_LOGITS", 4 * 4 * 37),
    ):
        monkeypatch.setattr(importlib.import_module(f"stree_jax.decoding.{module}"), name, value)
    # No other test scores four texts of this length, so the program is traced here.
    for text, got in zip(texts, st.score(model, texts), strict=True):
        np.testing.assert_allclose(got, float64(model, text), atol=1e-4)


@pytest.mark.thorough
def test_the_differentiable_form():
    model = random_model(st.ModelConfig.tiny(num_layers=1))
    text = TEXTS[0]
    padded = jnp.array([[*text, 1, 1]])
    np.testing.assert_allclose(
        jax.jit(st.text_log_probs)(model, padded)[0, : len(text) - 1],
        float64(model, text),
        atol=1e-4,
    )

    structure, weights = nnx.split(model)

    @jax.jit
    def total(weights):
        return st.text_log_probs(nnx.merge(structure, weights), padded[:, : len(text)]).sum()

    slope = jax.jit(jax.grad(total))(weights)
    norm = optax.tree.norm(slope)
    up, down = (
        total(jax.tree.map(lambda w, g, sign=sign: w + sign * 1e-3 * g / norm, weights, slope))
        for sign in (1, -1)
    )
    np.testing.assert_allclose((up - down) / 2e-3, norm, rtol=2e-2)
