"""Hybrids beyond the table of test_lossless.py: gradients, limits of length, full caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.testing import HYBRIDS, random_model, tiny_model
from stree_jax.training.objective import next_token_loss
from tests.helpers import refusal, some

# Their layers are those of others.
OF_OTHERS = {"bamba", "mamba_in_llama", "granite_moe", "qwen3_5", "mixed"}


@pytest.mark.parametrize("name", some(sorted({*HYBRIDS} - OF_OTHERS), "nemotron_h"))
def test_gradients_are_finite_and_reach_all_weights(name):
    model = tiny_model(f"{name} hybrid")
    structure, weights = nnx.split(model)
    tokens = jnp.arange(24).reshape(2, 12) % 37

    @jax.jit
    def gradient(weights):
        return jax.grad(lambda w: next_token_loss(nnx.merge(structure, w), tokens))(weights)

    for path, leaf in jax.tree.leaves_with_path(gradient(weights)):
        assert np.isfinite(leaf).all(), path
        # A router's correction affects which experts are chosen, not their weights.
        assert np.abs(leaf).max() > 0 or "correction" in jax.tree_util.keystr(path), path


def test_the_models_length_is_a_limit_that_max_length_lifts():
    config = dataclasses.replace(HYBRIDS["bamba"], max_length=20)
    model = random_model(config)
    prompts = [[1] * 5, [2] * 9]
    refusal(
        r"prompts\[1\] has 9 tokens .*all 21, .*limit is 20; max_",
        st.generate,
        model,
        prompts,
        max_new_tokens=12,
    )
    refusal(
        "in all 21, and the limit is 18$",
        st.generate,
        model,
        prompts,
        max_new_tokens=12,
        max_length=18,
    )
    assert st.generate(model, prompts, max_new_tokens=11).lengths.tolist() == [11, 11]
    assert st.generate(model, prompts, max_new_tokens=12, max_length=21).lengths[0] == 12


@pytest.mark.thorough
def test_a_full_cache_gives_nan_and_not_wrong_numbers():
    model = tiny_model("bamba hybrid")
    cache = model.init_cache(2, 6)
    tokens, lengths = jnp.ones((2, 4), jnp.int32), jnp.array([3, 4], jnp.int32)
    read = jax.jit(type(model).prefill)
    for _ in range(2):  # 6 tokens in the first row, 8 in the second
        _, cache = read(model, tokens, lengths, cache)
    logits, _ = read(model, tokens, jnp.ones(2, jnp.int32), cache)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
