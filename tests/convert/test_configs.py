"""Dialects of configs, and quirks."""

import dataclasses

import pytest

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints, configs
from tests.convert.checkpoints import WEIGHTS
from tests.helpers import assert_same_model


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
