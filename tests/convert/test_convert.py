"""Whole conversions."""

import os

import numpy as np
import pytest

import stree_jax as st
from stree_jax.convert import convert
from tests.convert import checkpoints, configs, numpy_mamba_ssm
from tests.convert.checkpoints import WEIGHTS


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
