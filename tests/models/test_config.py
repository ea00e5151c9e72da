import json
import math

import pytest
from flax import nnx

from stree_jax import HybridLM, Mamba2Config, ModelConfig
from stree_jax.config import AttentionConfig, MlpConfig
from tests.tiny import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_through_json(name):
    config = CONFIGS[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_infinity_is_not_bare_in_json():
    config = ModelConfig.tiny(dt_limit=(0.0, math.inf))
    assert "Infinity" not in json.dumps(config.to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, "num_groups = 3 does not divide num_heads = 4"),
        ({"conv_width": 1}, "conv_width must be an integer of at least 2, got 1"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit"),
        ({"norm": "layer"}, "norm must be one of .*'layer'"),
        ({"head_dim": 5}, "head_dim = 5 does not divide expand \\* d_model = 32"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1, got 0"),
        ({"padded_vocab_size": 3}, "padded_vocab_size = 3 is below vocab_size = 37"),
        ({"activation": "gelu"}, "activation must be 'silu', got 'gelu'"),
        ({"norm_groups": 5}, "norm_groups = 5 does not divide"),
        ({"eos_token": 37}, "eos_token = 37 is outside the vocabulary of 37"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_x_heads": 0}, "num_x_heads must be an integer of at least 1, got 0"),
        ({"norm_groups": 0}, "norm_groups must be an integer of at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.tiny(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"vocab_size": 5, "d_model": 4, "layers": ["mamba2"], "colour": 1},
            "no fields \\['colour'\\]",
        ),
        ({"vocab_size": 5, "d_model": 4, "layers": ["rwkv"]}, "unknown layer kinds \\['rwkv'\\]"),
        ({"vocab_size": 5, "d_model": 4, "layers": ["mamba2"]}, "mamba2 config is missing"),
        ({"vocab_size": 5}, "missing"),
        ({"vocab_size": "five", "d_model": 4, "layers": ["mlp"]}, "vocab_size"),
        ({"vocab_size": 5, "d_model": 4, "layers": ["mlp"]}, "the mlp config is missing"),
        ({"vocab_size": 5, "d_model": 4, "layers": [], "mamba2": {"num_heads": 2}}, "head_dim"),
        (None, "is a table of fields, got None"),
    ],
)
def test_damaged_configs_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(values)


def test_layers_that_cannot_run_are_refused_by_name():
    mixer = Mamba2Config(num_heads=2, head_dim=4, state_size=4)
    shape = dict(vocab_size=9, d_model=8, mamba2=mixer)
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4)
    config = ModelConfig(layers=("mamba2", "attention"), attention=attention, **shape)
    with pytest.raises(ValueError, match=r"\['attention'\] cannot be run by this version"):
        HybridLM(config, rngs=nnx.Rngs(0))
    config = ModelConfig(layers=("mlp",), mlp=MlpConfig(8), **shape)
    with pytest.raises(ValueError, match="has no 'mamba2'"):
        HybridLM(config, rngs=nnx.Rngs(0))


def test_presets_have_the_published_size():
    config = ModelConfig.preset("mamba2-2.7b")
    assert (config.d_model, len(config.layers), config.mamba2.num_heads) == (2560, 64, 80)
    assert (config.vocab_size, config.num_embeddings) == (50277, 50288)
    with pytest.raises(ValueError, match=r"unknown preset 'mamba3'.*'mamba2-130m'"):
        ModelConfig.preset("mamba3")


def test_the_number_of_parameters_of_a_preset():
    import jax

    model = nnx.eval_shape(lambda: HybridLM(ModelConfig.preset("mamba2-130m"), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 128_989_632


def test_other_weight_types_are_refused():
    with pytest.raises(ValueError, match="float32 or bfloat16, got float16"):
        HybridLM(ModelConfig.tiny(), dtype="float16", rngs=nnx.Rngs(0))
