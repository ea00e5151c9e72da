"""Matrices stored `[out, in]`: bfloat16 models that are loaded on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.checkpoint import save_pretrained
from stree_jax.convert.writing import write_as
from stree_jax.extensions.medusa.checkpoint import digest
from stree_jax.heads import sketch
from stree_jax.models.layers import OutFirst, in_first, out_first
from stree_jax.testing import tiny_model
from stree_jax.training.run import weights_digest
from stree_jax.training.trainer import cast

CHAIN = st.TreeTopology.chain(2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint with every kind of projection that has a bias or a head of its own."""
    path = tmp_path_factory.mktemp("stored") / "model"
    save_pretrained(tiny_model("falcon_h1 hybrid", dtype="bfloat16"), path)
    return path


@pytest.fixture(scope="module")
def loaded(stored):
    return st.from_pretrained(stored, dtype="bfloat16")


def kinds(model):
    return {type(leaf) for _, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Variable)}


def weights(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))


def assert_equal(have, want):
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_which_models_store_them(stored, loaded):
    assert OutFirst in kinds(loaded)
    for other in (
        st.from_pretrained(stored),
        st.from_pretrained(stored, dtype="bfloat16", mesh=st.make_mesh()),
        tiny_model("falcon_h1 hybrid", dtype="bfloat16"),
    ):
        assert OutFirst not in kinds(other)
        assert in_first(other) is other


def test_logits_are_those_of_the_other_order(loaded):
    tokens = np.random.default_rng(0).integers(loaded.config.vocab_size, size=(2, 9))
    other = cast(loaded, jnp.bfloat16)
    assert OutFirst not in kinds(other)
    for rows in (tokens, tokens[:1, :1]):
        have, want = (np.asarray(sequence(model, rows)) for model in (loaded, other))
        # Both round every layer's output to 8 bits, at other places of a sum.
        np.testing.assert_allclose(have, want, atol=0.02 * np.abs(want).max())


@jax.jit
def sequence(model, tokens):
    return model(tokens)


def test_everything_that_reads_weights_by_name_gets_the_usual_order(stored, loaded, tmp_path):
    want = weights(cast(st.from_pretrained(stored), jnp.bfloat16))
    assert_equal(weights(in_first(loaded)), want)
    assert_equal(weights(cast(loaded, jnp.bfloat16)), want)
    assert_equal(weights(st.shard(loaded, None)), want)
    assert_equal(weights(st.shard(loaded, st.make_mesh())), want)
    other = st.shard(loaded, None)
    for function in (digest, sketch, weights_digest):
        assert function(loaded) == function(other)
    save_pretrained(loaded, tmp_path / "again")
    assert_equal(
        weights(st.from_pretrained(tmp_path / "again")), weights(st.from_pretrained(stored))
    )
    (tmp_path / "hf").mkdir()
    write_as(loaded, tmp_path / "hf", "hf")
    assert_equal(weights(in_first(st.from_pretrained(tmp_path / "hf", dtype="bfloat16"))), want)


def test_text_with_drafts(loaded):
    """Drafts are accepted, and the first tokens are those of decoding without."""
    prompts = [[1, 2, 3], [4]]
    options = dict(max_new_tokens=12, eos_token=())
    plain = st.generate(loaded, prompts, **options)
    drafted = st.generate(
        loaded, prompts, drafter=st.ModelDrafter(loaded), topology=CHAIN, **options
    )
    assert drafted.stats.tau > 2
    np.testing.assert_array_equal(drafted.tokens[:, :4], plain.tokens[:, :4])


def test_no_float32_copy_of_the_weights():
    """XLA converted all of them before the loop, so the program read and held float32."""
    config = st.ModelConfig.mamba2_lm(512, 256, 4)
    model = st.HybridLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))

    def temporary(model):
        @jax.jit
        def loop(model, tokens):
            step = lambda _, tokens: jnp.argmax(model(tokens), axis=-1)  # noqa: E731
            return jax.lax.fori_loop(0, 8, step, tokens)

        # One row: jax 0.12 converts nothing for two.
        compiled = loop.lower(model, jnp.zeros((1, 1), int)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    before = temporary(model)
    out_first(model)
    assert temporary(model) < size / 4 < size < before
