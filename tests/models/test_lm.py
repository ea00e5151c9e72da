"""One model, four ways to run it that must agree: whole, prefill, tree, replay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import ModelConfig, TreeTopology
from stree_jax.models.cache import path_to
from stree_jax.testing import CONFIGS, HYBRIDS, random_model, tiny_model
from tests import oracle
from tests.helpers import apply, some

# The families of `make test`: with attention, multipliers, experts, the gated delta rule.
QUICK = ("plain", "falcon_h1 hybrid", "nemotron_h hybrid", "qwen3_5 hybrid")
BATCH, LENGTH, PADDED, MAX_LENGTH = 2, 11, 17, 24


def prefill(model, tokens, lengths):
    """From an empty cache. Prompts are padded, so that each model has one program."""
    padded = np.zeros((len(tokens), PADDED), np.int32)
    for row, buffer in zip(tokens, padded, strict=True):
        buffer[: len(row)] = row
    return prefill_from(model, padded, np.asarray(lengths, np.int32), None)


@jax.jit
def prefill_from(model, tokens, lengths, cache):
    cache = model.init_cache(len(tokens), MAX_LENGTH) if cache is None else cache
    return model.prefill(tokens, lengths, cache)


@jax.jit
def tree_forward(model, tokens, tree, cache, **options):
    return model.tree_forward(tokens, tree, cache, **options)


@jax.jit
def replay(model, cache, pending, path):
    return model.replay(cache, pending, path)


def random_tokens(model, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(model.config.vocab_size, size=shape).astype(np.int32)


def assert_close(got, want):
    """Equal up to float32 rounding at the scale of the array, since XLA fuses differently."""
    scale = np.abs(want).max(initial=1.0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-5 * scale)


def whole_tree(topology, batch=BATCH):
    return topology.tree(jnp.ones((batch, topology.num_nodes), bool))


TREE = TreeTopology.from_parents([-1, 0, 0, 1, 1, 2, 3, 6, 7])  # depth 5, more than K


@pytest.mark.parametrize("name", some(CONFIGS, *QUICK))
def test_logits_are_the_oracles(name):
    model = tiny_model(name)
    tokens = random_tokens(model, BATCH, LENGTH)
    got = apply(model, tokens)
    assert got.dtype == jnp.float32
    assert got.shape == (BATCH, LENGTH, model.config.num_embeddings)
    for row, want in zip(got, (oracle.logits(model, row) for row in tokens), strict=True):
        np.testing.assert_allclose(row, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", some(CONFIGS, *QUICK))
def test_a_tree_is_every_path_run_by_itself(name):
    """So it sees no other node, no other row and no padding."""
    model = tiny_model(name)
    prompts = random_tokens(model, BATCH, LENGTH)
    lengths = [LENGTH, 4]
    drafts = random_tokens(model, BATCH, TREE.num_nodes, seed=1)
    _, cache = prefill(model, prompts, lengths)
    got, _, after = tree_forward(model, drafts, whole_tree(TREE), cache)
    for b in range(BATCH):
        for node in range(TREE.num_nodes):
            path = np.flatnonzero(TREE.ancestor_mask[node])
            alone = oracle.logits(model, [*prompts[b, : lengths[b]], *drafts[b, path]])[-1]
            np.testing.assert_allclose(got[b, node], alone, atol=3e-5 * np.abs(alone).max())
    jax.tree.map(np.testing.assert_array_equal, after, cache)  # a forward writes no cache


@pytest.mark.parametrize("name", some(CONFIGS, *QUICK))
def test_replay_is_prefill_of_the_accepted_tokens(name):
    model = tiny_model(name)
    prompts = random_tokens(model, BATCH, LENGTH)
    lengths = [LENGTH, 2]
    drafts = random_tokens(model, BATCH, TREE.num_nodes, seed=1)
    _, cache = prefill(model, prompts, lengths)
    tree = whole_tree(TREE)
    _, pending, _ = tree_forward(model, drafts, tree, cache)
    # Row 0 accepts 0, 1, 2, 3, 5 drafts; row 1 another number, or nothing at all.
    for last in ([0, 2], [1, 0], [3, 8], [6, -1], [8, 4]):
        replayed = replay(model, cache, pending, path_to(tree, jnp.array(last)))
        rows = [
            [
                *prompts[b, : lengths[b]],
                *drafts[b, TREE.ancestor_mask[last[b]]][: 99 * (last[b] >= 0)],
            ]
            for b in range(BATCH)
        ]
        _, want = prefill(model, rows, [len(row) for row in rows])
        jax.tree.map(assert_close, replayed, want)


_PARALLEL = HYBRIDS["falcon_h1"]
# Over a tree some norms are deferred past the output projection.
NORMS = {
    "and a multiplier": dataclasses.replace(CONFIGS["plain"], residual_multiplier=0.6),
    "and an output bias": ModelConfig.tiny(out_proj_bias=True),
    "beside a branch": ModelConfig.tiny(mlp_dim=6),
    "of groups": ModelConfig.tiny(num_groups=2),
    "and attention": dataclasses.replace(
        _PARALLEL, mamba2=dataclasses.replace(_PARALLEL.mamba2, norm="gate_then_norm")
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NORMS)
def test_the_gated_norm_of_a_tree_is_that_of_a_sequence(name):
    model = random_model(NORMS[name])
    tokens = random_tokens(model, BATCH, 6)
    chain = whole_tree(TreeTopology.chain(5))
    got, _, _ = tree_forward(model, tokens, chain, model.init_cache(BATCH, 6))
    assert_close(got, apply(model, tokens))


def test_padding_does_not_reach_the_cache():
    model = tiny_model("groups")
    prompts = random_tokens(model, BATCH, 9)
    lengths = [5, 0]
    logits, cache = prefill(model, prompts, lengths)
    prompts[0, 5:] = 0
    prompts[1] = 1
    logits_again, cache_again = prefill(model, prompts, lengths)
    np.testing.assert_array_equal(logits[0], logits_again[0])
    jax.tree.map(np.testing.assert_array_equal, cache, cache_again)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf[1], 0), cache)


@pytest.mark.thorough
def test_bfloat16_keeps_state_and_logits_in_float32():
    model = tiny_model("plain", dtype="bfloat16")
    tokens = random_tokens(model, BATCH, LENGTH)
    logits, cache = prefill(model, tokens, [LENGTH, 4])
    assert logits.dtype == jnp.float32
    assert {layer.ssm.dtype.name for layer in cache} == {"float32"}
    assert {layer.conv.dtype.name for layer in cache} == {"bfloat16"}
    mixer = model.blocks[0].mixer
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == mixer.D.dtype == jnp.float32
    exact = oracle.logits(model, tokens[0])[-1]
    assert np.abs(np.asarray(logits)[0] - exact).max() < 0.05 * np.abs(exact).max()
