import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stree_jax import HybridLM, ModelConfig
from stree_jax.convert.writing import written_as
from stree_jax.layer_config import (
    AttentionConfig,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
)
from stree_jax.testing import CONFIGS, HYBRIDS


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
        ({"conv_width": 1}, "conv_width must be an integer, at least 2; got 1"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit"),
        ({"norm": "layer"}, "norm must be one of .*'layer'"),
        ({"head_dim": 5}, "head_dim = 5 does not divide expand \\* d_model = 32"),
        ({"vocab_size": 0}, "vocab_size must be an integer, at least 1; got 0"),
        ({"padded_vocab_size": 3}, "padded_vocab_size = 3 is below vocab_size = 37"),
        ({"activation": "gelu"}, "activation must be 'silu', got 'gelu'"),
        ({"norm_groups": 5}, "norm_groups = 5 does not divide"),
        ({"eos_token": 37}, "eos_token = 37 is outside the vocabulary of 37"),
        ({"num_layers": 0}, "num_layers must be an integer, at least 1; got 0"),
        ({"num_x_heads": 0}, "num_x_heads must be an integer, at least 1; got 0"),
        ({"norm_groups": 0}, "norm_groups must be an integer, at least 1; got 0"),
        ({"head_dim": 0}, "head_dim must be an integer, at least 1; got 0"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0, got 0.0"),
        ({"state_size": 1 << 60}, "state_size must be below 2\\*\\*48"),
        ({"num_layers": 9000}, "layers has 9000 entries; at most 8192"),
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
        ({"layers": "mamba2"}, "layers must be tuple"),
        ({"vocab_size": 5, "d_model": 4, "layers": [[]]}, "layers must be tuple"),
    ],
)
def test_damaged_configs_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(values)


WRONG = {
    "a number": ([1.0], "1", True, math.nan, "inf", -math.inf, 1e39, 10**400, {}),
    "an integer": ([1], "1", True, 1.5, "inf", 10**400, {}),
    "a flag": (0, -1, 1.0, "true", [True], {}),
    "a name": (0, [], ["silu"], True, {}),
    "a list": (0, "x", ["x"], [None] * 5, [[]], True, {}),
}


@pytest.mark.parametrize(
    "name", ["plain", "falcon_h1 hybrid", "zamba2 hybrid", "nemotron_h hybrid"]
)
def test_values_of_a_wrong_type_are_refused(name):
    """Every field of a native config.json, with values of every wrong type and infinite ones."""
    values = CONFIGS[name].to_dict()
    tables = [values, *(part for part in values.values() if isinstance(part, dict))]
    for table in tables:
        for field, value in table.items():
            kinds = {float: "a number", int: "an integer", bool: "a flag", str: "a name"}
            kind = "a list" if isinstance(value, list) else kinds.get(type(value))
            for wrong in WRONG.get(kind, ()):
                table[field] = wrong
                with pytest.raises(ValueError, match=f"{field}|layer kinds") as error:
                    ModelConfig.from_dict(values)
                assert len(str(error.value)) < 300
            table[field] = value


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 1e-200}, {"rope_scaling": RopeScaling(1e-200, 1.0, 2.0, 1)}]
)
def test_rotary_frequencies_are_finite(changes):
    with pytest.raises(ValueError, match="give infinite frequencies"):
        AttentionConfig(1, 1, 128, rotary_dim=128, **changes)


def test_a_model_remembers_something():
    config = ModelConfig(vocab_size=9, d_model=8, layers=("mlp",), mlp=MlpConfig(8))
    with pytest.raises(ValueError, match="no memory of other tokens"):
        HybridLM(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (AttentionConfig, (4, 3, 8), "num_kv_heads = 3 does not divide num_heads = 4"),
        (AttentionConfig, (4, 2, 8, 1, None, 5), "rotary_dim must be even and at most head_dim"),
        (MlpConfig, (8, "tanh"), "activation must be one of .*'tanh'"),
        (MoeConfig, (4, 5, 8), "num_active = 5 is more than the 4 experts"),
        (MoeConfig, (4, 2, 8, "best"), "router must be one of .*'best'"),
        (MoeConfig, (4, 2, 8, "sigmoid", 3), "3 groups of 4 experts is not possible"),
        (RopeScaling, (8.0, 4.0, 1.0, 9), "0 < low_freq_factor < high_freq_factor"),
        (SharedConfig, (0, 4), "num_blocks must be an integer, at least 1; got 0"),
    ],
)
def test_bad_parts_are_named(part, values, message):
    with pytest.raises(ValueError, match=message):
        part(*values)


def test_what_a_shared_layer_needs():
    shape = dataclasses.asdict(HYBRIDS["zamba2"])
    with pytest.raises(ValueError, match="to a 'mamba2' layer, which must come next"):
        ModelConfig.from_dict(shape | {"layers": ("mamba2", "shared")})
    with pytest.raises(ValueError, match="the shared config is missing"):
        ModelConfig.from_dict(shape | {"shared": None})
    with pytest.raises(ValueError, match="input_multiple is 2 in a model with 'shared' layers"):
        ModelConfig.from_dict(shape | {"layers": ("mamba2", "attention")})


def test_presets_have_the_published_size():
    config = ModelConfig.preset("mamba2-2.7b")
    assert (config.d_model, len(config.layers), config.mamba2.num_heads) == (2560, 64, 80)
    assert (config.vocab_size, config.num_embeddings) == (50277, 50288)
    with pytest.raises(ValueError, match=r"unknown preset 'mamba3'; known: .*mamba2-130m"):
        ModelConfig.preset("mamba3")


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("mamba2-130m", 128_989_632),
        ("MambaInLlama-8B", 8.3e9),
        ("MambaInLlama-3B", 3.35e9),
        ("Nemotron-H-8B", 8.1e9),
        ("Falcon-H1-0.5B", 0.52e9),
        ("Granite-4-H-350M", 0.34e9),
        ("Granite-4-H-1B", 1.46e9),
        ("Granite-4-H-Tiny", 6_939_037_248),
    ],
)
def test_the_number_of_parameters_of_a_preset(name, num_parameters):
    config = ModelConfig.preset(name)
    kinds = tuple(dict.fromkeys(config.layers))

    def size(layers):
        _, weights = HybridLM.abstract(dataclasses.replace(config, layers=layers))
        return sum(leaf.size for leaf in jax.tree.leaves(weights))

    # One of each kind, and the rest by their kind: all layers would take seconds.
    few = total = size(kinds)
    for kind in kinds:
        total += (config.layers.count(kind) - 1) * (size((*kinds, kind)) - few)
    assert total == pytest.approx(num_parameters, rel=0.0 if type(num_parameters) is int else 0.03)


def test_the_structure_of_a_deep_model_takes_a_time_linear_in_its_layers():
    """Counted in calls of Python functions, which do not depend on the machine's load."""

    def num_calls(num_layers):
        config = ModelConfig.tiny(num_layers=num_layers)
        calls = 0

        def count(_frame, event, _argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            HybridLM.abstract(config)
        finally:
            sys.setprofile(None)
        return calls

    num_calls(1)  # imports and caches
    few, many = num_calls(8), num_calls(40)
    assert many < 5 * few


@pytest.mark.parametrize("name", CONFIGS)
def test_the_abstract_structure_is_that_of_a_model(name):
    """Each layer has weights of its own, although only one of its kind was traced."""
    structure, weights = HybridLM.abstract(CONFIGS[name])
    whole = nnx.eval_shape(lambda: HybridLM(CONFIGS[name], rngs=nnx.Rngs(0)))
    want = nnx.to_pure_dict(nnx.state(whole))
    assert jax.tree.map(jnp.shape, want) == jax.tree.map(jnp.shape, weights)
    model = nnx.merge(structure, want)
    assert model.config == CONFIGS[name]
    assert [block.kind for block in model.blocks] == list(CONFIGS[name].layers)


def test_other_weight_types_are_refused():
    with pytest.raises(ValueError, match="float32 or bfloat16, got float16"):
        HybridLM(ModelConfig.tiny(), dtype="float16", rngs=nnx.Rngs(0))


def test_mamba2_lm_in_bambas_layout():
    """A trained hybrid can be written for transformers."""
    attention = dict(num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=4)
    config = ModelConfig.tiny(
        attention_layers=[1], attention=attention, mlp={"hidden_size": 24}, residual_float32=False
    )
    assert config.layers == ("mamba2", "mlp", "attention", "mlp")
    assert written_as(config, "hf", "float32", Path("out")).family == "bamba"
    with pytest.raises(ValueError, match="MlpConfig has no fields .'width'."):
        ModelConfig.tiny(mlp={"width": 24})
