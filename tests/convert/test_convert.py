"""Whole conversions, and families that are added to the table."""

import os

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import (
    FAMILIES,
    Description,
    Family,
    convert,
    formats,
    open_checkpoint,
    tables,
)
from tests.convert import checkpoints
from tests.convert.small import WEIGHTS
from tests.tiny import randomised


def test_the_destination_is_whole_or_absent(checkpoint, tmp_path, monkeypatch):
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


def test_a_destination_that_appears_during_the_work_is_kept(checkpoint, tmp_path, monkeypatch):
    from stree_jax import checkpoint as native

    def slow(*arguments, **options):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("mine")
        return real(*arguments, **options)

    real = native._quiet
    monkeypatch.setattr(native, "_quiet", slow)
    with pytest.raises(ValueError, match="appeared in the meantime"):
        convert(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["precious"]
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


def test_a_model_that_transformers_cannot_hold(tmp_path):
    config = checkpoints.mamba_ssm_config(
        d_intermediate=100, ssm_cfg=dict(D_has_hdim=True, rmsnorm=False)
    )
    path = checkpoints.write_safetensors(
        tmp_path / "x", config, checkpoints.mamba_ssm_weights(config)
    )
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


# --- A family that is one entry of the table.


def read_example(source):
    """A family that can say little: everything else is `ModelConfig.tiny`'s."""
    fields = source.fields
    fields.take("model_type", "")
    fields.take("dtype", "")
    config = st.ModelConfig.tiny(
        num_layers=fields.integer("depth"),
        num_groups=fields.integer("groups"),
        padded_vocab_size=fields.integer("rows"),
    )
    rules = tables.mamba_ssm(config, embedding="embed")
    return Description("an example", config, rules, [], fields.finish())


def write_example(config, dtype):
    return {
        "model_type": "example",
        "dtype": dtype,
        "depth": len(config.layers),
        "groups": config.mamba2.num_groups,
        "rows": config.num_embeddings,
    }


def random_model(**changes):
    return randomised(st.HybridLM(st.ModelConfig.tiny(**changes), rngs=nnx.Rngs(0)), 0)


EXAMPLES = {
    "by its model_type": Family(read_example, write_example, padded_vocab=True),
    "by a file beside config.json": Family(
        read_example,
        write_example,
        recognise=lambda source: "example.json" in source.beside,
        mark="example.json",
        beside={"example.json": lambda config: {"version": 1}},
        padded_vocab=True,
    ),
}


@pytest.mark.parametrize("how", EXAMPLES)
def test_an_added_family_is_written_recognised_and_read(how, tmp_path, monkeypatch):
    model = random_model(num_groups=2, padded_vocab_size=40)
    native, other, back = (tmp_path / name for name in ("native", "other", "back"))
    narrow = tmp_path / "narrow"
    st.save_pretrained(model, native)
    st.save_pretrained(random_model(conv_width=3), narrow)
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "example", EXAMPLES[how])
        assert formats()[-1] == "example"
        convert(native, other, to="example")
        assert open_checkpoint(other).description.family == "an example"
        convert(other, back)
        for path in (other, back):
            loaded = st.from_pretrained(path)
            assert loaded.config == model.config
            jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
        with pytest.raises(ValueError, match="example has no place for mamba2.conv_width = 3"):
            convert(narrow, tmp_path / "out", to="example")
        (other / "config.json").write_text('{"model_type": "unheard of"}')
        if how == "by its model_type":
            with pytest.raises(ValueError, match="of no known family .* zamba2, example$"):
                open_checkpoint(other)
    with pytest.raises(ValueError, match="of no known family"):
        open_checkpoint(other)
    with pytest.raises(ValueError, match="to must be one of .*got 'example'"):
        convert(native, tmp_path / "out", to="example")
