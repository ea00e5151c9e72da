"""Whole conversions, dialects of configs, quirks, and a new family, an entry of the table."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

import stree_jax as st
from stree_jax import testing
from stree_jax.convert import FAMILIES, convert, formats, open_checkpoint
from tests.convert import checkpoints, configs, numpy_mamba_ssm
from tests.convert.checkpoints import WEIGHTS
from tests.helpers import assert_same_model


def test_the_destination_is_complete_or_absent(checkpoint, tmp_path, monkeypatch):
    (checkpoint / "tokenizer.json").write_text("{}")
    convert(checkpoint, tmp_path / "native")
    assert (tmp_path / "native" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ValueError, match="native exists; choose another name"):
        convert(checkpoint, tmp_path / "native")
    with pytest.raises(ValueError, match="to must be one of .*got 'onnx'"):
        convert(checkpoint, tmp_path / "out", to="onnx")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(checkpoint, tmp_path / "out", to="hf")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "native"]


def test_a_model_that_transformers_cannot_hold(tmp_path):
    config = configs.mamba_ssm_config(
        d_intermediate=100, ssm_cfg=dict(D_has_hdim=True, rmsnorm=False)
    )
    path = tmp_path / "x"
    checkpoints.described_checkpoint(path, numpy_mamba_ssm, config)
    message = (
        r"mamba2 has no place for layers = .*'mlp'.*; mamba2.d_per_channel = True \(only False"
    )
    with pytest.raises(ValueError, match=message):
        convert(path, tmp_path / "out", to="mamba2")
    with pytest.raises(ValueError, match="no family of transformers can hold this model"):
        convert(path, tmp_path / "out", to="hf")
    with pytest.raises(ValueError, match=r"to must be one of \('native', 'hf', 'mamba2', 'bamba'"):
        convert(path, tmp_path / "out", to="gguf")
    assert os.listdir(tmp_path) == ["x"]


def test_bfloat16_keeps_the_scalars_in_float32(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "small", dtype="bfloat16")
    model = st.from_pretrained(tmp_path / "small", dtype=None)
    assert str(model.embedding.dtype) == "bfloat16"
    mixer = model.blocks[0].mixer
    for weight, name in ((mixer.A_log, "A_log"), (mixer.D, "D"), (mixer.dt_bias, "dt_bias")):
        want = WEIGHTS[f"backbone.layers.0.mixer.{name}"]
        np.testing.assert_array_equal(weight[...], want)


def test_quirks_are_known_and_belong_to_a_family(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"unknown quirks \['fast'\]; known: \['hf_dt_floor'"):
        open_checkpoint(checkpoint, ["fast"])
    with pytest.raises(ValueError, match=r"this family has no quirk \['plain_rope'\]"):
        open_checkpoint(checkpoint, ["plain_rope"])
    convert(checkpoint, tmp_path / "native")
    with pytest.raises(ValueError, match="is native; quirks are for"):
        st.from_pretrained(tmp_path / "native", quirks=["plain_rope"])


@pytest.mark.parametrize("embedding", ["embedding", "embeddings"])
def test_a_config_of_transformers_4(checkpoint, embedding):
    """Bare Infinity, unused fields, several end tokens, the old name of the embedding."""
    want = st.from_pretrained(checkpoint)
    weights = dict(WEIGHTS)
    weights[f"backbone.{embedding}.weight"] = weights.pop("backbone.embedding.weight")
    checkpoints.write_safetensors(checkpoint, {}, weights)
    (checkpoint / "config.json").write_text(configs.CODESTRAL_HF)
    have = st.from_pretrained(checkpoint)
    want.config = dataclasses.replace(
        want.config, vocab_size=48, padded_vocab_size=None, eos_token=(0, 2)
    )
    assert_same_model(have, want)
    notes = "; ".join(open_checkpoint(checkpoint).ignored)
    assert "norm_before_gate: transformers never read it" in notes


def test_the_published_config_of_mamba_ssm(checkpoint):
    (checkpoint / "config.json").write_text(configs.MAMBA2_130M)
    assert open_checkpoint(checkpoint).description.family == "mamba_ssm"
    assert open_checkpoint(checkpoint).ignored == [
        "fused_add_norm: a choice of kernels",
        "attn_cfg: attention settings; no layer has attention",
    ]


def random_model(**changes):
    return testing.random_model(st.ModelConfig.tiny(**changes))


def assert_goes_there_and_back(model, folder, family):
    """Through a native checkpoint, one of the new family, and a native one again."""
    paths = [folder / name for name in ("native", "other", "back")]
    st.save_pretrained(model, paths[0])
    convert(paths[0], paths[1], to="example")
    convert(paths[1], paths[2])
    assert open_checkpoint(paths[1]).description.family == family
    for path in paths:
        assert_same_model(st.from_pretrained(path).in_first(), model)


def test_the_family_of_the_docs(tmp_path, monkeypatch):
    """Recognised by its model_type, and by nothing once its entry is gone."""
    monkeypatch.setitem(FAMILIES, "example", None)  # restores the table at the end
    docs = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    exec(docs.read_text().split("```python")[1].split("```")[0], {})
    assert formats()[-1] == "example"
    model = random_model(d_model=32, head_dim=64, state_size=128, chunk_size=64)
    assert_goes_there_and_back(model, tmp_path, "example")
    st.save_pretrained(random_model(d_model=32, head_dim=64), tmp_path / "small")
    with pytest.raises(ValueError, match="example has no place for mamba2.state_size = 8"):
        convert(tmp_path / "small", tmp_path / "out", to="example")
    monkeypatch.delitem(FAMILIES, "example")
    with pytest.raises(ValueError, match="of no known family .*'example'"):
        open_checkpoint(tmp_path / "other")
    with pytest.raises(ValueError, match="to must be one of .*got 'example'"):
        convert(tmp_path / "small", tmp_path / "out", to="example")
