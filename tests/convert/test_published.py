"""Published configs are read completely, and agree with the presets."""

import dataclasses
import json

import numpy as np
import pytest

import stree_jax as st
from stree_jax.checkpoint.arrays import Tensor
from stree_jax.convert.families import describe
from stree_jax.convert.rules import check_coverage
from stree_jax.names import flatten
from tests.convert import configs


def read(tmp_path, values, **beside):
    for name, file in beside.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    path = tmp_path / "config.json"
    return describe(path, json.loads(json.dumps(values)), {}).config


def shape(config):
    """The config without what presets leave out: multipliers, length limits and tokens."""
    plain = dataclasses.replace(
        config,
        embedding_multiplier=1.0,
        logits_multiplier=1.0,
        max_length=None,
        eos_token=None,
        mamba2=dataclasses.replace(
            config.mamba2,
            input_multiplier=1.0,
            output_multiplier=1.0,
            section_multipliers=(1.0,) * 5,
        ),
    )
    if plain.attention is not None:
        plain = dataclasses.replace(
            plain,
            attention=dataclasses.replace(
                plain.attention, input_multiplier=1.0, key_multiplier=1.0, output_multiplier=1.0
            ),
        )
    if plain.mlp is not None:
        mlp = dataclasses.replace(plain.mlp, gate_multiplier=1.0, output_multiplier=1.0)
        plain = dataclasses.replace(plain, mlp=mlp)
    return plain


@pytest.mark.parametrize(
    ("values", "preset"),
    [
        (configs.FALCON_H1_500M, "Falcon-H1-0.5B"),
        (configs.GRANITE_350M, "Granite-4-H-350M"),
        (configs.NEMOTRON_H_8B, "Nemotron-H-8B"),
        (configs.NEMOTRON_3_NANO, "Nemotron-3-Nano-30B"),
        (configs.ZAMBA2_2B, "Zamba2-2.7B"),
    ],
)
def test_the_preset_says_the_same(values, preset, tmp_path):
    assert shape(read(tmp_path, values)) == shape(st.ModelConfig.preset(preset))


def test_falcons_multipliers(tmp_path):
    config = read(tmp_path, configs.FALCON_H1_500M)
    assert config.mamba2.output_multiplier == 0.23570226039551587
    assert config.mlp.gate_multiplier == 0.8838834764831844
    assert config.attention.key_multiplier == 0.390625
    assert config.logits_multiplier == 0.0390625


@pytest.mark.parametrize(
    ("values", "num_parameters"),
    [
        (configs.BAMBA_9B, 9.78e9),
        (configs.NEMOTRON_3_NANO, 31.6e9),
        (configs.ZAMBA2_2B, 2.69e9),
        (configs.MAMBA2ATTN, 2.7e9),
    ],
)
def test_the_number_of_parameters(values, num_parameters, tmp_path):
    config = read(tmp_path, values)
    _, weights = st.HybridLM.abstract(config)
    leaves = flatten(weights)
    assert sum(leaf.size for leaf in leaves.values()) == pytest.approx(num_parameters, rel=0.02)
    # Every weight has a rule whose transform produces its shape.
    description = describe(tmp_path / "config.json", values, {})
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    source = {
        name: Tensor(shape, np.dtype(np.float32), lambda: None)
        for rule in description.rules
        if rule.target in shapes
        for name, shape in zip(
            rule.sources, rule.transform.source_shapes(shapes[rule.target]), strict=True
        )
    }
    assert check_coverage(description.rules, description.ignored, source, shapes)


def test_mamba_in_llama_8b(tmp_path):
    mamba_config = {
        "d_model": 4096,
        "ssm_cfg": {"expand": 1, "ngroups": 32, "d_state": 128},
        "rms_norm_eps": 1e-5,
        "vocab_size": None,
        "d_inner": 4096,
        "d_xb": 1024,
        "intermediate_size": 14336,
        "hidden_act": "silu",
        "n_layer": 32,
        "attn_layers": list(range(1, 32, 2)),
    }
    config = read(tmp_path, configs.LLAMA_3_1_8B, mamba_config=mamba_config)
    assert shape(config) == shape(st.ModelConfig.preset("MambaInLlama-8B"))
    assert config.max_length == 131072
    assert config.eos_token == (128001, 128008, 128009)


def test_the_draft_of_stree(tmp_path):
    """Its config.json has the attention settings of another model."""
    llama = configs.LLAMA_3_1_8B | dict(
        hidden_size=1024,
        head_dim=128,
        intermediate_size=2048,
        num_attention_heads=24,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    mamba_config = {
        "d_model": 1024,
        "ssm_cfg": {"expand": 1, "ngroups": 8, "d_state": 128},
        "rms_norm_eps": 1e-5,
        "vocab_size": None,
        "d_inner": 1024,
        "d_xb": 256,
        "intermediate_size": 2048,
        "hidden_act": "silu",
        "n_layer": 2,
        "attn_layers": [],
    }
    config = read(tmp_path, llama, mamba_config=mamba_config)
    assert shape(config) == shape(st.ModelConfig.preset("MambaInLlama-draft"))
