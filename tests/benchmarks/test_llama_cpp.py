"""GGUF files of the benchmark, and llama.cpp on them, which CI does not have."""

import dataclasses
import functools

import pytest

import stree_jax as st
from benchmarks import llama_cpp
from stree_jax.convert import convert
from stree_jax.testing import CONFIGS, HYBRIDS, perturbed, random_model

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")


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


def loaded(model, directory):
    """A model in llama.cpp, by way of transformers' format."""
    st.save_pretrained(model, directory)
    write = functools.partial(convert, directory, dtype="float32", to="hf")
    return llama_cpp.loaded(write, "float32", 64, 1)


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_llama_cpp(name, tmp_path):
    """Its tokens are ours, without drafts and with a draft model that is sometimes right."""
    model, prompt, settings = random_model(MODELS[name]), [3, 1, 4], {"tokens": 24, "eos": None}
    ours = st.generate(model, [prompt], max_new_tokens=24).tokens[0].tolist()
    target, draft = (
        loaded(each, tmp_path / folder)
        for folder, each in {"target": model, "draft": perturbed(model, 0.1)}.items()
    )
    for _ in range(2):
        assert llama_cpp.plain(target, prompt, **settings).tolist() == ours
        drafts = llama_cpp.drafted(target, draft, prompt, num_drafts=3, **settings)
        assert drafts.tolist() == ours
