"""Packed matrices: models that are loaded on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.checkpoint import save_pretrained
from stree_jax.convert.writing import write_as
from stree_jax.measuring.clock import num_bytes
from stree_jax.models.identity import identity
from stree_jax.models.matrices import Matrix, Packed, Storage, in_first
from stree_jax.testing import tiny_model
from stree_jax.training.trainer import cast
from tests.helpers import apply, refusal, temporary_bytes

DTYPES = ("float32", "bfloat16")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "qwen3_5 hybrid")]


def saved(name, tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "model"
    save_pretrained(tiny_model(name, dtype="bfloat16"), path)
    return path


# Projections of Mamba-2, of attention and of an MLP.
@pytest.fixture(scope="module", params=["falcon_h1 hybrid", *SLOW])
def stored(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=DTYPES)
def loaded(stored, request):
    return st.from_pretrained(stored, dtype=request.param)


def storages(model):
    """The storages of all matrices but an embedding that is no output head."""
    kept = None if model.head is None else model.embedding
    matrices = [leaf for _, leaf in nnx.iter_graph(model) if type(leaf) is Matrix]
    return {type(matrix.storage) for matrix in matrices if matrix is not kept}


def weights(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))


def assert_equal(have, want):
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_which_models_have_them(stored, loaded):
    made = tiny_model("falcon_h1 hybrid", dtype="bfloat16")
    assert storages(loaded) == storages(made.packed()) == {Packed}
    assert made.head is None or type(made.packed().embedding.storage) is Storage
    for other in (st.from_pretrained(stored, mesh=st.make_mesh()), made):
        assert storages(other) == {Storage}
        assert in_first(other) is other
    assert loaded.packed() is not loaded
    with pytest.raises(ValueError, match="on one device, and this one is on a mesh"):
        st.from_pretrained(stored, mesh=st.make_mesh()).packed()


def test_activations_are_float32(loaded):
    """Whatever the weights are; of an unpacked model they have the weights' type."""
    assert loaded.activation_dtype == jnp.float32
    assert loaded.in_first().activation_dtype == loaded.dtype
    for model in (loaded, loaded.in_first()):
        have = {leaf.dtype for leaf in jax.tree.leaves(model.init_cache(1, 8))} - {jnp.dtype("i4")}
        assert have == {model.activation_dtype, jnp.dtype("float32")}
        hidden = jax.eval_shape(type(model).hidden, model, jnp.zeros((1, 2), int))
        assert hidden.dtype == model.activation_dtype


def test_logits_are_those_of_the_usual_order(loaded):
    tokens = np.random.default_rng(0).integers(loaded.config.vocab_size, size=(2, 9))
    other = in_first(loaded)
    # bfloat16 rounds every layer's output to 8 bits if it is not packed.
    error = 0.02 if loaded.dtype == jnp.bfloat16 else 1e-5
    for rows in (tokens, tokens[:1, :1], np.tile(tokens, (1, 16))):
        have, want = (np.asarray(apply(model, rows)) for model in (loaded, other))
        np.testing.assert_allclose(have, want, atol=error * np.abs(want).max())


def test_everything_that_reads_weights_by_name_gets_the_usual_order(stored, loaded, tmp_path):
    name = loaded.dtype.name
    usual = load_usual(stored)
    want = weights(cast(usual, loaded.dtype))
    assert_equal(weights(in_first(loaded)), want)
    assert_equal(weights(cast(loaded, loaded.dtype)), want)
    assert_equal(weights(st.shard(loaded, None)), want)
    assert_equal(weights(st.shard(loaded, st.make_mesh())), want)
    assert identity(in_first(loaded)) == identity(st.shard(loaded, None))
    save_pretrained(loaded, tmp_path / "again")
    assert_equal(weights(load_usual(tmp_path / "again")), weights(usual))
    (tmp_path / "hf").mkdir()
    write_as(loaded, tmp_path / "hf", "hf")
    assert_equal(weights(in_first(st.from_pretrained(tmp_path / "hf", dtype=name))), want)


def load_usual(path):
    """A float32 model that never had blocks."""
    return st.shard(st.from_pretrained(path, mesh=st.make_mesh()), None)


@pytest.mark.thorough
def test_no_float32_copy_of_the_weights():
    """XLA converted all of them before the loop, so the program read and held float32."""
    config = st.ModelConfig.mamba2_lm(512, 256, 4)
    model = st.HybridLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    size = num_bytes(model)
    # A quarter of the weights are states of the scan.
    assert temporary_bytes(model.packed()) < size / 3 < size < temporary_bytes(model)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_fits_its_target(dtype, tmp_path_factory):
    """In bfloat16 on a CPU, whatever the target; as the target elsewhere."""
    stored = saved("plain", tmp_path_factory)
    loaded = st.from_pretrained(stored, dtype=dtype)
    draft = st.load_draft(stored, loaded)
    assert (draft.dtype, draft.activation_dtype) == (jnp.bfloat16, jnp.float32)
    on_mesh = st.from_pretrained(stored, dtype=loaded.dtype, mesh=st.make_mesh())
    assert st.load_draft(stored, on_mesh).dtype == loaded.dtype
    out = st.generate(on_mesh, [[1, 2]], drafter=st.ModelDrafter(st.load_draft(stored, on_mesh)))
    wanted = st.generate(loaded, [[1, 2]], drafter=st.ModelDrafter(draft))
    if loaded.dtype == jnp.float32:
        np.testing.assert_array_equal(out.tokens, wanted.tokens)
    refusal("there is no", st.load_draft, "nowhere at all", loaded)
