"""GGUF files of the benchmark, and llama.cpp on them. CI has neither of the two packages."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from benchmarks import llama_cpp
from stree_jax.convert import convert
from stree_jax.testing import CONFIGS, HYBRIDS, perturbed, random_model

gguf = pytest.importorskip("gguf")


def hybrid(*, attention, mlp, **changes):
    """Bamba with other attention layers, MLPs and numbers of the model."""
    config = HYBRIDS["bamba"]
    other = {"attention": dict(num_heads=2, num_kv_heads=1) | attention, "mlp": mlp}
    layers = (dataclasses.replace(layer, **other.get(layer.kind, {})) for layer in config.layers)
    return dataclasses.replace(config, layers=tuple(layers), **changes)


MODELS = {
    "mamba2": CONFIGS["plain"],
    "bamba": hybrid(attention={}, mlp={}),
    "granite": hybrid(
        attention=dict(rotary_dim=0, scale=0.3),
        mlp=dict(bias=False),
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        logits_multiplier=0.25,
    ),
}


def write(model, directory, precision="float32"):
    """A model as GGUF, by way of transformers' format."""
    path = directory / f"{precision}.gguf"
    if not directory.exists():
        st.save_pretrained(model, directory)
        convert(directory, directory / "hf", dtype="float32", to="hf")
    llama_cpp.write_gguf(directory / "hf", path, precision)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_every_weight(name, tmp_path):
    """In both precisions, of which one has float32 for all that is no matrix."""
    model = random_model(MODELS[name])
    full, half = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (write(model, tmp_path / "it", kind) for kind in ("float32", "bfloat16"))
    )
    decay = -jnp.exp(model.blocks[0].mixer.A_log[...])
    np.testing.assert_allclose(full["blk.0.ssm_a"].data[:, 0], decay, rtol=1e-6)
    np.testing.assert_array_equal(full["token_embd.weight"].data, model.embedding[...])
    assert {tensor.tensor_type.name for tensor in half.values()} == {"F32", "BF16"}
    assert half.keys() == full.keys()
    assert all((half[name].shape == tensor.shape).all() for name, tensor in full.items())


def test_the_order_of_rows():
    """4 of 6 channels are turned; two heads."""
    moved = llama_cpp.interleaved(np.arange(12)[:, None], head_dim=6, rotary=4)
    np.testing.assert_array_equal(moved[:, 0], [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11])


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_llama_cpp(name, tmp_path):
    """Its tokens are ours, without drafts and with a draft model that is sometimes right."""
    pytest.importorskip("llama_cpp")
    model, prompt, settings = random_model(MODELS[name]), [3, 1, 4], {"tokens": 24, "eos": None}
    ours = st.generate(model, [prompt], max_new_tokens=24).tokens[0].tolist()
    target, draft = (
        llama_cpp.Model(write(each, tmp_path / folder), 64, 1, float32=True)
        for folder, each in {"target": model, "draft": perturbed(model, 0.1)}.items()
    )
    for _ in range(2):
        assert llama_cpp.plain(target, prompt, **settings).tolist() == ours
        drafts = llama_cpp.drafted(target, draft, prompt, num_drafts=3, **settings)
        assert drafts.tolist() == ours
