"""Whole conversions, dialects of configs, quirks, and a new family, an entry of the table."""

import dataclasses
import os

import numpy as np
import pytest

import stree_jax as st
from stree_jax import testing
from stree_jax.convert import FAMILIES, convert, formats, open_checkpoint
from stree_jax.convert.families import describe
from stree_jax.convert.writing import written_as
from stree_jax.testing import CONFIGS, HYBRIDS
from tests.convert import checkpoints, configs, numpy_mamba_ssm
from tests.convert.checkpoints import WEIGHTS
from tests.extensions.mtp_files import target_files
from tests.extensions.qwen_files import model_config
from tests.helpers import DOCS, assert_same_model, by_message, python_blocks, refusal


def test_the_destination_is_new(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").write_text("{}")
    convert(checkpoint, tmp_path / "native")
    assert (tmp_path / "native" / "tokenizer.json").read_text() == "{}"
    refusal("native exists; choose another name", convert, checkpoint, tmp_path / "native")


def test_a_model_that_transformers_cannot_hold(tmp_path):
    config = configs.mamba_ssm_config(
        d_intermediate=100, ssm_cfg=dict(D_has_hdim=True, rmsnorm=False)
    )
    path = tmp_path / "x"
    checkpoints.described_checkpoint(path, numpy_mamba_ssm, config)
    for to, message in (
        ("mamba2", r"has no place for layers = .*'mlp'.*; mamba2.d_per_channel = True .only False"),
        ("hf", "no family of transformers can hold this model"),
        ("gguf", r"to must be one of \('native', 'hf', 'mamba2', 'bamba'"),
    ):
        refusal(message, convert, path, tmp_path / "out", to=to)
    assert os.listdir(tmp_path) == ["x"]


def test_quirks_are_known_and_belong_to_a_family(checkpoint, tmp_path):
    refusal(
        r"unknown quirks \['fast'\]; known: \['hf_dt_floor'", open_checkpoint, checkpoint, ["fast"]
    )
    refusal(
        r"this family has no quirk \['plain_rope'\]", open_checkpoint, checkpoint, ["plain_rope"]
    )
    convert(checkpoint, tmp_path / "native")
    refusal(
        "is native; quirks are for", st.from_pretrained, tmp_path / "native", quirks=["plain_rope"]
    )


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


@pytest.mark.skipif(not DOCS.is_dir(), reason="the tests run without a checkout")
def test_the_family_of_the_docs(tmp_path, monkeypatch):
    """Recognised by its model_type, and by nothing once its entry is gone."""
    monkeypatch.setitem(FAMILIES, "example", None)  # restores the table at the end
    exec(python_blocks(DOCS / "checkpoints.md")[0][1], {})
    assert formats()[-1] == "example"
    config = st.ModelConfig.tiny(d_model=32, head_dim=64, state_size=128, chunk_size=64)
    model = testing.random_model(config)
    st.save_pretrained(model, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "other", to="example")
    convert(tmp_path / "other", tmp_path / "back")
    assert open_checkpoint(tmp_path / "other").description.family == "example"
    for name in ("native", "other", "back"):
        assert_same_model(st.from_pretrained(tmp_path / name).in_first(), model)
    small = testing.random_model(st.ModelConfig.tiny(d_model=32, head_dim=64))
    st.save_pretrained(small, tmp_path / "small")
    refusal(
        "example has no place for mamba2.state_size = 8",
        convert,
        tmp_path / "small",
        tmp_path / "out",
        to="example",
    )
    monkeypatch.delitem(FAMILIES, "example")
    refusal("of no known family .*'example'", open_checkpoint, tmp_path / "other")


def test_the_text_model_of_a_wrapper(tmp_path):
    config, tensors = target_files(HYBRIDS["nemotron_h"], "hf")
    path = checkpoints.write_safetensors(tmp_path / "text", config, tensors)
    outer = {"model_type": "nemotron_h_omni", "vision_config": {"model_type": "radio"}}
    inside = {f"language_model.{name}": value for name, value in tensors.items()}
    inside["language_model.mtp.layers.0.enorm.weight"] = np.ones(4, np.float32)
    one = np.ones((2, 2), np.float32)
    inside |= {f"vision_model.blocks.{i}.weight": one + i for i in range(20)}
    wrapped = checkpoints.write_safetensors(
        tmp_path / "wrapped", outer | {"llm_config": config}, inside
    )
    found = open_checkpoint(wrapped)
    assert found.description.family == "transformers nemotron_h inside nemotron_h_omni"
    text = "\n".join(found.ignored)
    assert "vision_model.blocks.0.weight and 19 others: not of the text model of nemotron" in text
    assert "language_model.mtp.layers.0.enorm.weight: part of a multi-token" in text
    convert(wrapped, tmp_path / "native")
    models = [st.from_pretrained(each) for each in (path, wrapped, tmp_path / "native")]
    assert_same_model(*models[:2])
    assert_same_model(*models[1:])


def test_which_layers_have_experts_and_limits(tmp_path):
    config = {"model_type": "qwen3_next", "num_hidden_layers": 6, "full_attention_interval": 3}
    config |= {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    kinds = describe(tmp_path / "config.json", config, {}).config.kinds
    assert kinds[::2] == ("gated_delta", "gated_delta", "attention") * 2
    assert kinds[1::2] == ("mlp", "moe", "mlp", "mlp", "mlp", "moe")
    limits = dict(expert_swiglu_limit_list=[0, 4, 7.0], share_expert_swiglu_limit_list=[None] * 2)
    config = target_files(HYBRIDS["bailing_hybrid"], "hf")[0] | limits
    config |= {"num_nextn_predict_layers": 1}
    described = describe(tmp_path / "config.json", config, {})
    experts, after = described.config.layers[3], described.mtp.config.feed_forward
    assert (experts.limit, experts.shared_limit) == (4, None)
    assert (after.limit, after.shared_limit) == (7, None)


QWEN = model_config()
OLMO = dataclasses.replace(QWEN.layers[0], beta_scale=2.0)
SMALL, MLP, EXPERTS = st.AttentionConfig(2, 1, 8), st.MlpConfig(8), st.MoeConfig(4, 2, 8)
NO_HEAD = "has no place for this multi-token prediction head: "
NEMOTRON = HYBRIDS["nemotron_h"]
# A model, the feed-forward part of its head, a family, and what that has no place for.
NO_PLACE = [
    (
        QWEN,
        QWEN.mlp,
        "qwen3_5_text",
        r"no place for .*: attention.num_heads = 2 .only 4.*, and more$",
    ),
    (
        dataclasses.replace(QWEN, norm_float32=False),
        None,
        "qwen3_5_text",
        "norm_float32 = False .on",
    ),
    (
        dataclasses.replace(QWEN, layers=(OLMO, *QWEN.layers[1:])),
        *(None, "qwen3_5_text", "gated_delta.beta_scale = 2.0 .only 1.0."),
    ),
    (QWEN, None, "qwen3_next", "it has no layer 'moe', only .'attention', 'gated_delta'"),
    (CONFIGS["plain"], EXPERTS, "mamba2", f"mamba2 {NO_HEAD}it has no such heads"),
    (NEMOTRON, MLP, "nemotron_h", f"nemotron_h {NO_HEAD}.*feed_forward.kind = 'mlp'"),
    (NEMOTRON, EXPERTS, "nemotron_h", f"nemotron_h {NO_HEAD}attention.num_heads = 2 .only"),
]


@by_message(("config", "after", "family", "message"), NO_PLACE)
def test_what_a_family_has_no_place_for(config, after, family, message, tmp_path):
    head = after and st.MtpConfig(config.d_model, SMALL, after)
    said = {family: message}
    if NO_HEAD in message:
        said["hf"] = f"nearest: transformers' {message}|{NO_HEAD}"
    for to, words in said.items():
        refusal(words, written_as, config, to, "float32", tmp_path, head)
