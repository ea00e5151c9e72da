"""Checkpoints with the names that transformers holds in memory, and text models inside wrappers."""

import json

import numpy as np
import pytest

import stree_jax as st
from stree_jax.convert.reading import open_checkpoint
from stree_jax.convert.writing import write_as
from stree_jax.testing import HYBRIDS
from tests.convert import checkpoints
from tests.convert.checkpoints import write_safetensors
from tests.helpers import assert_same_model


def tensors_of(path):
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def assert_same(*paths):
    assert_same_model(*map(st.from_pretrained, paths))


@pytest.mark.parametrize("model_type", ["nemotron_h", "granitemoehybrid"])
def test_a_state_dict_of_transformers(model_type, tmp_path):
    """Saved as it is, without transformers' own renaming."""
    changes = dict(
        nemotron_h=dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"]),
        granitemoehybrid=dict(num_local_experts=4, num_experts_per_tok=2),
    )
    hf = checkpoints.hf_checkpoint(tmp_path / "disk", model_type, **changes[model_type])
    tensors = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
    config = json.loads((tmp_path / "disk" / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight")
    assert any(name.endswith("experts.down_proj") for name in tensors)
    assert_same(tmp_path / "disk", write_safetensors(tmp_path / "memory", config, tensors))


@pytest.mark.parametrize("table", ["text_config", "llm_config"])
def test_the_text_model_of_a_wrapper(table, tmp_path):
    path = tmp_path / "text"
    path.mkdir()
    write_as(checkpoints.random_model(HYBRIDS["nemotron_h"]), path, "hf")
    config, tensors = json.loads((path / "config.json").read_text()), tensors_of(path)
    outer = {"model_type": "nemotron_h_omni", "vision_config": {"model_type": "radio"}}
    inside = {f"language_model.{name}": value for name, value in tensors.items()}
    inside["language_model.mtp.layers.0.enorm.weight"] = np.ones(4, np.float32)
    one = np.ones((2, 2), np.float32)
    inside |= {f"vision_model.blocks.{i}.weight": one + i for i in range(20)}
    wrapped = write_safetensors(tmp_path / "wrapped", outer | {table: config}, inside)
    assert_same(path, wrapped)
    found = open_checkpoint(wrapped)
    assert found.description.family == "transformers nemotron_h inside nemotron_h_omni"
    text = "\n".join(found.ignored)
    assert "vision_model.blocks.0.weight and 19 others: not of the text model of nemotron" in text
    assert "language_model.mtp.layers.0.enorm.weight: part of a multi-token" in text
    st.convert.convert(wrapped, tmp_path / "native")
    assert_same(path, tmp_path / "native")
