"""Configs that are refused, and dialects that are accepted."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.convert import convert, open_checkpoint
from tests.convert import checkpoints
from tests.convert.small import CONFIG, WEIGHTS, refused

HF = {"model_type": "mamba2", "hidden_size": 16, "num_heads": 4, "head_dim": 8}

ATTENTION = {"causal": True, "num_heads": 2}


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ssm_cfg": {}}, "ssm_cfg.layer is 'Mamba1' \\(the default\\); only Mamba-2"),
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer is 'Mamba1'; only Mamba-2"),
        (CONFIG | {"attn_layer_idx": [1]}, "attn_cfg.causal is not true"),
        (CONFIG | {"attn_layer_idx": [2]}, "attn_layer_idx must be a list of layers below 2"),
        (
            CONFIG | {"attn_layer_idx": [1], "attn_cfg": ATTENTION | {"novel": 1}},
            r"unknown fields \['attn_cfg.novel'\]",
        ),
        (
            CONFIG
            | {"attn_layer_idx": [1], "attn_cfg": ATTENTION | {"rotary_emb_interleaved": True}},
            "rotary_emb_interleaved = true is not supported",
        ),
        (CONFIG | {"rms_norm": False}, r"rms_norm = false \(LayerNorm\) is not supported"),
        (CONFIG | {"novel": 1}, r"unknown fields \['novel'\]; they might change"),
        (
            CONFIG | {"ssm_cfg": CONFIG["ssm_cfg"] | {"novel": 1}},
            r"unknown fields \['ssm_cfg.novel'\]",
        ),
        (CONFIG | {"d_model": "16"}, "d_model must be an integer, .*'16'"),
        (CONFIG | {"n_layer": 10**9}, "n_layer must be an integer, from 1 to 4096"),
        (CONFIG | {"d_model": None}, "d_model is missing"),
        (CONFIG | {"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
        ({"model_type": "mamba"}, "'mamba': Mamba-1 layers"),
        ({"model_type": "jamba"}, "'jamba': Mamba-1 layers"),
        ({"model_type": "qwen3_next"}, "'qwen3_next': gated delta net"),
        ({"model_type": "recurrent_gemma"}, "'recurrent_gemma': RG-LRU"),
        ({"model_type": "bamba", "partial_rotary_factor": "x", "novel": 1}, "unknown fields"),
        (
            {"model_type": "bamba", "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor is not 0.5",
        ),
        ({"model_type": "bamba", "rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
        (
            {"model_type": "bamba", "rope_scaling": {"type": "llama3"}},
            r"rope_parameters\.factor is missing",
        ),
        ({"model_type": "bamba", "mamba_n_heads": 3}, "mamba_n_heads = 3 does not divide 8192"),
        ({"model_type": "falcon_h1", "mlp_multipliers": [1]}, "mlp_multipliers must be 2 numbers"),
        ({"model_type": "falcon_h1", "hidden_act": "relu"}, "hidden_act is 'relu', not one of"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba"]},
            "layer_types has 1 entries for num_hidden_layers = 32",
        ),
        (
            {"model_type": "granitemoehybrid", "num_experts_per_tok": 9},
            "num_active = 9 is more than the 8 experts",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*x"},
            "hybrid_override_pattern must consist of M\\*-E, got 'M\\*x'",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "num_hidden_layers": 3},
            "has 2 letters for 3 layers",
        ),
        ({"model_type": "nemotron_h", "layers_block_type": ["rwkv"]}, r"unknown kinds \[.*rwkv"),
        ({"model_type": "zamba2", "use_long_context": True}, "use_long_context = true is not"),
        (
            {"model_type": "zamba2", "num_hidden_layers": 1, "layers_block_type": ["mamba"]},
            "no layer of layers_block_type is 'hybrid'",
        ),
        ({"model_type": "nemotron_h_omni"}, "a multimodal wrapper"),
        ({"model_type": "llama"}, "of no known family \\(model_type = 'llama'\\)"),
        ({"d_model": 8, "n_layer": 2}, "has no ssm_cfg: a Mamba-1 model"),
        ({"model_type": "mamba2", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mamba2", "hidden_size": 100}, "is not num_heads \\* head_dim"),
        ({"dim": 64, "n_layers": 1, "vocab_size": 9, "n_heads": 8}, "of no known family"),
        (CONFIG | {"attn_layer_idx": 1}, "attn_layer_idx must be a list of layers"),
        (
            CONFIG | {"ssm_cfg": CONFIG["ssm_cfg"] | {"norm_before_gate": "false"}},
            "norm_before_gate must be true or false, got 'false'",
        ),
        (CONFIG | {"ssm_cfg": CONFIG["ssm_cfg"] | {"d_conv": 1}}, r"config\.json: conv_width must"),
        (HF | {"time_step_limit": [0.0, {"__float__": ["x"]}]}, "time_step_limit must be two"),
        (HF | {"layer_norm_epsilon": 10**400}, "layer_norm_epsilon must be a number, got 1000"),
        (HF | {"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a number above 0"),
        (HF | {"use_bias": 1}, "use_bias must be true or false, got 1"),
        ([1], "it is not a JSON object"),
        ({"model_type": "nemotron_h", "layer_types": [[]]}, r"config\.json: .*unknown kinds"),
        ({"model_type": "granitemoehybrid", "layer_types": [{}]}, "unknown kinds"),
        (
            {"model_type": "zamba2", "hidden_size": 32, "num_attention_heads": 65}
            | {"num_hidden_layers": 1, "layers_block_type": ["hybrid"], "n_mamba_heads": 8},
            r"config\.json: num_attention_heads = 65 does not divide 2 \* hidden_size = 64",
        ),
        (CONFIG | {"attn_layer_idx": [0] * 100_000}, "attn_layer_idx must be a list of layers"),
        (HF | {"expand": True}, "expand must be a number, got True"),
        (HF | {"novel": _nested(600)}, r"config\.json is damaged: it is nested more than 32 deep"),
        (HF | {"use_bias": "x" * 10_000}, "use_bias must be true or false, got 'xxx"),
        ({"model_type": ["x" * 10_000]}, "of no known family"),
    ],
)
def test_configs_that_are_refused(checkpoint, config, message):
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(checkpoint, message)


@pytest.mark.parametrize(
    ("config", "mamba_config", "message"),
    [
        ({}, {"d_inner": 24}, r"mamba_config\.json: d_inner = 24 is not ssm_cfg\.ngroups"),
        ({}, {"n_layer": 9}, r"n_layer is not config\.json's num_hidden_layers"),
        ({}, {"attn_layers": [9]}, "attn_layers must be a list of layers below"),
        ({}, {"novel": 1}, r"unknown fields \['novel'\]"),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}, "rope_type is 'yarn'"),
    ],
)
def test_damaged_mamba_in_llama(tmp_path, config, mamba_config, message):
    path = tmp_path / "model"
    configs = checkpoints.mamba_in_llama_configs()
    checkpoints.mamba_in_llama_checkpoint(path, *configs)
    names = ("config.json", "mamba_config.json")
    for name, values, changes in zip(names, configs, (config, mamba_config), strict=True):
        (path / name).write_text(json.dumps(values | changes))
    refused(path, message)


def test_quirks_are_known_and_belong_to_a_family(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"unknown quirks \['fast'\]; known: \['hf_dt_floor'"):
        open_checkpoint(checkpoint, ["fast"])
    with pytest.raises(ValueError, match=r"this family has no quirk \['plain_rope'\]"):
        open_checkpoint(checkpoint, ["plain_rope"])
    convert(checkpoint, tmp_path / "native")
    with pytest.raises(ValueError, match="is native; quirks are for"):
        st.from_pretrained(tmp_path / "native", quirks=["plain_rope"])


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"a": }'])
def test_damaged_json(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, r"config\.json is damaged")


# As published, except for the sizes. This one has fields of old conversions.
CODESTRAL_HF = """{
  "_name_or_path": "/repo/codestral", "_attn_implementation_autoset": true,
  "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256,
  "conv_kernel": 4, "eos_token_id": [0, 2], "expand": 2, "head_dim": 8, "hidden_act": "silu",
  "hidden_size": 16, "initializer_range": 0.1, "intermediate_size": 32,
  "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 1, "norm_before_gate": true,
  "num_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "rescale_prenorm_residual": false,
  "residual_in_fp32": true, "rms_norm": true, "state_size": 8, "tie_word_embeddings": false,
  "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_limit": [0.0, Infinity],
  "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0,
  "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0", "use_bias": false,
  "use_cache": true, "use_conv_bias": true, "vocab_size": 48 }"""


@pytest.mark.parametrize("embedding", ["embedding", "embeddings"])
def test_a_config_of_transformers_4(checkpoint, embedding):
    """Bare Infinity, unused fields, several end tokens, the old name of the embedding."""
    want = st.from_pretrained(checkpoint)
    weights = dict(WEIGHTS)
    weights[f"backbone.{embedding}.weight"] = weights.pop("backbone.embedding.weight")
    checkpoints.write_safetensors(checkpoint, {}, weights)
    (checkpoint / "config.json").write_text(CODESTRAL_HF)
    have = st.from_pretrained(checkpoint)
    assert have.config == dataclasses.replace(
        want.config, vocab_size=48, padded_vocab_size=None, eos_token=(0, 2)
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(have), nnx.state(want))
    notes = "; ".join(open_checkpoint(checkpoint).ignored)
    assert "norm_before_gate: transformers never read it" in notes


MAMBA2_130M = """{ "d_model": 16, "d_intermediate": 0, "n_layer": 2, "vocab_size": 37,
  "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}, "attn_layer_idx": [],
  "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
  "pad_vocab_size_multiple": 16, "tie_embeddings": false }"""


def test_the_published_config_of_mamba_ssm(checkpoint):
    (checkpoint / "config.json").write_text(MAMBA2_130M)
    assert open_checkpoint(checkpoint).description.family == "mamba_ssm"
    assert open_checkpoint(checkpoint).ignored == [
        "fused_add_norm: a choice of kernels",
        "attn_cfg: attention settings; no layer has attention",
    ]
