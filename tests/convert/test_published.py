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


def read(tmp_path, values, mamba_config=None):
    if mamba_config is not None:
        (tmp_path / "mamba_config.json").write_text(json.dumps(mamba_config))
    return describe(tmp_path / "config.json", json.loads(json.dumps(values)), {})


def shape(config):
    """The config without what presets leave out: multipliers, length limits and tokens."""
    multipliers = dict.fromkeys(("input_multiplier", "output_multiplier", "key_multiplier"), 1.0)
    multipliers |= dict(gate_multiplier=1.0, section_multipliers=(1.0,) * 5)
    names = ["mamba2", "attention", "mlp"]
    differing = [layer.kind for layer in config.distinct_layers]  # LFM3's attention
    parts = {name: getattr(config, name) for name in names if differing.count(name) < 2}
    plain = {
        name: dataclasses.replace(
            part, **{key: one for key, one in multipliers.items() if hasattr(part, key)}
        )
        for name, part in parts.items()
        if part is not None
    }
    return dataclasses.replace(
        config,
        embedding_multiplier=1.0,
        logits_multiplier=1.0,
        max_length=None,
        eos_token=None,
        **plain,
    )


@pytest.mark.parametrize(
    ("files", "preset"),
    [
        ((configs.FALCON_H1_500M,), "Falcon-H1-0.5B"),
        ((configs.GRANITE_350M,), "Granite-4-H-350M"),
        ((configs.NEMOTRON_H_8B,), "Nemotron-H-8B"),
        ((configs.NEMOTRON_3_NANO,), "Nemotron-3-Nano-30B"),
        ((configs.ZAMBA2_2B,), "Zamba2-2.7B"),
        (configs.MAMBA_IN_LLAMA_8B, "MambaInLlama-8B"),
        (configs.MAMBA_IN_LLAMA_DRAFT, "MambaInLlama-draft"),
        ((configs.QWEN3_NEXT,), "Qwen3-Next-80B-A3B"),
        ((configs.QWEN3_5_08B,), "Qwen3.5-0.8B"),
        ((configs.QWEN3_5_27B,), "Qwen3.5-27B"),
        ((configs.QWEN3_8_27B,), "Qwen3.8-27B"),
        ((configs.QWEN3_5_35B,), "Qwen3.5-35B-A3B"),
        ((configs.KIMI_LINEAR_48B,), "Kimi-Linear-48B-A3B"),
        ((configs.LING_3_FLASH,), "Ling-3.0-flash"),
        ((configs.LING_3_TINY,), "Ling-3.0-tiny"),
        ((configs.LFM2_350M,), "LFM2-350M"),
        ((configs.LFM2_1B,), "LFM2-1.2B"),
        ((configs.LFM2_2B,), "LFM2-2.6B"),
        ((configs.LFM2_8B,), "LFM2-8B-A1B"),
        ((configs.LFM3_2B,), "LFM3-1.7B"),
    ],
)
def test_the_preset_says_the_same(files, preset, tmp_path):
    assert shape(read(tmp_path, *files).config) == shape(st.ModelConfig.preset(preset))


@pytest.mark.parametrize(
    ("values", "num_parameters"),
    [
        (configs.BAMBA_9B, 9.78e9),
        (configs.NEMOTRON_3_NANO, 31.6e9),
        (configs.ZAMBA2_2B, 2.69e9),
        (configs.MAMBA2ATTN, 2.7e9),
        (configs.QWEN3_5_08B, 0.75e9),
        (configs.QWEN3_5_35B, 34.7e9),
        (configs.LFM2_350M, 0.354e9),
        (configs.LFM2_8B, 8.34e9),
        (configs.LFM3_2B, 1.7e9),
    ],
)
def test_the_number_of_parameters(values, num_parameters, tmp_path):
    description = read(tmp_path, values)
    _, weights = st.HybridLM.abstract(description.config)
    leaves = flatten(weights)
    assert sum(leaf.size for leaf in leaves.values()) == pytest.approx(num_parameters, rel=0.02)
    # Every weight has a rule whose transform produces its shape.
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
