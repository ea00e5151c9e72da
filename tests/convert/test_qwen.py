"""Checkpoints of Qwen3-Next and Qwen3.5 as they are released, with their heads."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import stree_jax as st
from stree_jax.convert.families import describe
from stree_jax.convert.writing import write_as, written_as
from tests.convert import checkpoints
from tests.extensions.qwen_files import model_config
from tests.helpers import apply, assert_same_model

# Small checkpoints of random weights with what transformers computes in float64.
REFERENCES = Path("/work/shared/data/tiny_gated_delta")


def test_the_other_family_has_the_same_weights(tmp_path):
    """Qwen3-Next's projections are interleaved by key head; the model in memory is the same."""
    model, names = (
        checkpoints.random_model(model_config(experts=True)),
        ("qwen3_next", "qwen3_5_moe_text"),
    )
    for name in names:
        (tmp_path / name).mkdir()
        write_as(model, tmp_path / name, name)
    assert_same_model(*(st.from_pretrained(tmp_path / name) for name in names))


def test_which_layers_have_experts(tmp_path):
    config = {"model_type": "qwen3_next", "num_hidden_layers": 6, "full_attention_interval": 3}
    config |= {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    kinds = describe(tmp_path / "config.json", config, {}).config.kinds
    assert kinds[::2] == ("gated_delta", "gated_delta", "attention") * 2
    assert kinds[1::2] == ("mlp", "moe", "mlp", "mlp", "mlp", "moe")


def test_a_layer_or_a_head_that_qwen_has_not(tmp_path):
    own = model_config()
    plain = st.MtpConfig(16, st.AttentionConfig(2, 1, 8), own.mlp)
    message = r"qwen3_5_text has no place for .*: attention.num_heads = 2 .only 4.*, and more$"
    with pytest.raises(ValueError, match=message):
        written_as(own, "qwen3_5_text", "float32", tmp_path, plain)
    config = dataclasses.replace(own, norm_float32=False)
    with pytest.raises(ValueError, match="no place for norm_float32 = False .only True."):
        write_as(checkpoints.random_model(config), tmp_path, "qwen3_5_text")
    olmo = dataclasses.replace(own.layers[0], beta_scale=2.0)
    config = dataclasses.replace(own, layers=(olmo, *own.layers[1:]))
    with pytest.raises(ValueError, match=r"no place for gated_delta.beta_scale = 2.0 .only 1.0."):
        write_as(checkpoints.random_model(config), tmp_path, "qwen3_5_text")
    with pytest.raises(ValueError, match="it has no layer 'moe', only .'attention', 'gated_delta'"):
        write_as(checkpoints.random_model(own), tmp_path, "qwen3_next")


@pytest.mark.skipif(not REFERENCES.is_dir(), reason="the references are not here")
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_logits_are_those_of_float64(name):
    model = st.from_pretrained(REFERENCES / name)
    reference = np.load(REFERENCES / name / "reference.npz")
    tokens, want = reference["prompt_2"], reference["logits_2"]
    have = apply(model, tokens[None])[0]
    np.testing.assert_allclose(have, want, rtol=0, atol=2e-5 * np.abs(want).max())
