"""Tree decoding of every family of hybrids is autoregressive decoding, token for token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.decoding.prefill import prefill
from stree_jax.testing import HYBRIDS, tiny_model
from stree_jax.training.objective import next_token_loss
from tests.decoding.test_lossless import PROMPTS, assert_same_tokens

NEW_TOKENS = 16
# A chain as long as the convolutions, and a tree that is not in level order.
TOPOLOGIES = {
    "chain": st.TreeTopology.chain(4),
    "branching": st.TreeTopology.from_branching((2, 2)),
    "one wide level": st.TreeTopology.from_branching((5,)),
    "ragged": st.TreeTopology.from_parents([-1, 0, 1, 0, 3, 1]),
}


@pytest.fixture(autouse=True)
def _forget_programs_of_the_last_test():
    jax.clear_caches()  # the largest programs of all tests; see conftest.py


def decode(model, **options):
    return st.generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, return_cache=True, **options)


# The ragged tree covers what the others do; those run for attention with a convolution, and for
# attention in parallel with Mamba-2.
@pytest.mark.parametrize(
    ("name", "trees"),
    [
        *((name, ("chain", "ragged")) for name in HYBRIDS),
        *((name, ("branching", "one wide level")) for name in ("mamba2attn", "falcon_h1")),
    ],
)
def test_every_family(name, trees):
    model, unrelated = (tiny_model(f"{name} hybrid", seed=seed) for seed in (0, 1))
    plain = decode(model)
    for topology in map(TOPOLOGIES.__getitem__, trees):
        itself, other = (
            decode(model, drafter=st.ModelDrafter(draft), topology=topology)
            for draft in (model, unrelated)
        )
        for out in (itself, other):
            assert_same_tokens(out, plain, model)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                out.cache,
                plain.cache,
            )
        # The target as its own draft is right at every depth along the first children.
        depth, node = 0, 0
        while topology.children[node]:
            node, depth = topology.children[node][0], depth + 1
        full_steps = NEW_TOKENS // (depth + 1)
        assert itself.stats.accepted_per_depth[depth - 1] >= len(PROMPTS) * full_steps
        assert other.stats.tau < 1.5 < itself.stats.tau


def test_draft_and_target_of_different_families():
    target, draft = tiny_model("falcon_h1 hybrid"), tiny_model("nemotron_h hybrid")
    topology = TOPOLOGIES["branching"]
    out = decode(target, drafter=st.ModelDrafter(draft), topology=topology)
    assert_same_tokens(out, decode(target), target)


def test_end_of_sequence_and_bfloat16():
    """Rows end at different steps, inside accepted paths; others continue. In bfloat16 too."""
    model = tiny_model("mamba2attn hybrid")
    free = decode(model)
    eos = [int(free.tokens[0, 5]), int(free.tokens[2, 7])]
    options = dict(drafter=st.ModelDrafter(model), topology=TOPOLOGIES["chain"], eos_token=eos)
    plain, tree = decode(model, eos_token=eos), decode(model, **options)
    assert_same_tokens(tree, plain, model)
    assert tree.lengths.tolist() == plain.lengths.tolist()
    assert tree.lengths[0] <= 6
    assert tree.lengths[2] <= 8
    assert len(set(tree.lengths.tolist())) > 1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        tree.cache,
        plain.cache,
    )
    small = tiny_model("mamba2attn hybrid", dtype="bfloat16")
    out = decode(small, **options | {"drafter": st.ModelDrafter(small), "eos_token": None})
    assert out.lengths.tolist() == [NEW_TOKENS] * len(PROMPTS)
    assert out.stats.tau > 2


@pytest.mark.parametrize("name", HYBRIDS)
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


def test_a_long_prompt():
    """8,000 tokens, read in pieces, next to a shorter row; positions continue from there."""
    model = tiny_model("bamba hybrid")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(37, size=8000).tolist(), [4, 2]]
    plain = st.generate(model, prompts, max_new_tokens=8)
    tree = st.generate(
        model,
        prompts,
        max_new_tokens=8,
        drafter=st.ModelDrafter(model),
        topology=TOPOLOGIES["branching"],
        return_cache=True,
    )
    assert_same_tokens(tree, plain, model, prompts)
    assert tree.stats.tau > 2
    (attention,) = (layer for layer in tree.cache if hasattr(layer, "kv"))
    assert attention.kv.length.tolist() == [8007, 9]


def test_pieces_of_a_prompt_are_the_prompt():
    model = tiny_model("bamba hybrid")
    tokens = jnp.asarray(np.random.default_rng(0).integers(37, size=(2, 1024)), jnp.int32)
    lengths = jnp.array([1000, 400], jnp.int32)  # two pieces, and one that is not full
    pieces = prefill(model, tokens, lengths, 1030)
    _, whole = jax.jit(type(model).prefill)(model, tokens, lengths, model.init_cache(2, 1030))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), pieces, whole)


def test_requests_beyond_the_models_length_are_refused():
    config = dataclasses.replace(HYBRIDS["bamba"], max_length=20)
    model = st.HybridLM(config, rngs=nnx.Rngs(0))
    prompts = [[1] * 5, [2] * 9]
    with pytest.raises(
        ValueError, match=r"prompts\[1\] has 9 tokens .*all 21, .*limit is 20; max_"
    ):
        st.generate(model, prompts, max_new_tokens=12)
    with pytest.raises(ValueError, match="in all 21, and the limit is 18$"):
        st.generate(model, prompts, max_new_tokens=12, max_length=18)
    assert st.generate(model, prompts, max_new_tokens=11).lengths.tolist() == [11, 11]
    assert st.generate(model, prompts, max_new_tokens=12, max_length=21).lengths[0] == 12


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
