import copy
import json
import math
import pickle
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stree_jax import HybridLM, ModelConfig
from stree_jax.models.cache import init_pending
from stree_jax.testing import CONFIGS
from tests.helpers import python


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_through_json(name):
    config = CONFIGS[name]
    text = json.dumps(config.to_dict(), allow_nan=False)  # nor a bare infinity
    assert ModelConfig.from_dict(json.loads(text)) == config


def test_a_layer_of_any_kind_is_given_by_the_name_of_its_kind():
    """Also one that joins others, from its own config or from theirs."""
    layer = CONFIGS["falcon_h1 hybrid"].layers[0]
    config = ModelConfig(37, 16, (layer,) * 2)
    assert ModelConfig(37, 16, ("parallel",) * 2, parallel=layer) == config
    assert ModelConfig(37, 16, ("parallel",) * 2, **layer.parts) == config


@pytest.mark.thorough
def test_a_config_is_copied_and_pickled():
    config = CONFIGS["mixed hybrid"]
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert hash(same) == hash(config)
    load = f"import pickle; c = pickle.loads({pickle.dumps(config)})"
    python("-c", f"{load}; assert c in {{c.with_layers(c.layers)}}")


WRONG = {
    "a number": ([1.0], "1", True, math.nan, "inf", -math.inf, 1e39, 10**400, {}),
    "an integer": ([1], "1", True, 1.5, "inf", 10**400, {}),
    "a flag": (0, -1, 1.0, "true", [True], {}),
    "a name": (0, [], ["silu"], True, {}),
}


@pytest.mark.parametrize(
    "name", ["plain", "falcon_h1 hybrid", "zamba2 hybrid", "nemotron_h hybrid"]
)
def test_values_of_a_wrong_type_are_refused(name):
    """Every number, flag and name of a native config.json, of wrong types and infinite."""
    values = CONFIGS[name].to_dict()
    tables = [values, values["configs"], *values["configs"].values()]
    for table in tables:
        for field, value in table.items():
            kinds = {float: "a number", int: "an integer", bool: "a flag", str: "a name"}
            for wrong in WRONG.get(kinds.get(type(value)), ()):
                table[field] = wrong
                with pytest.raises(ValueError, match=f"{field}|layer kinds") as error:
                    ModelConfig.from_dict(values)
                assert len(str(error.value)) < 300
            table[field] = value


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("mamba2-130m", 128_989_632),
        ("mamba2-2.7b", 2_702_599_680),
        ("MambaInLlama-8B", 8.3e9),
        ("MambaInLlama-3B", 3.35e9),
        ("Nemotron-H-8B", 8.1e9),
        ("Falcon-H1-0.5B", 0.52e9),
        ("Granite-4-H-350M", 0.34e9),
        ("Granite-4-H-Tiny", 6_939_037_248),
        ("Qwen3.5-9B", 8.95e9),
        ("Qwen3.5-27B", 26.9e9),
        ("Qwen3-Next-80B-A3B", 79_674_391_296),  # as Qwen3-Coder-Next's files say
    ],
)
def test_the_number_of_parameters_of_a_preset(name, num_parameters):
    _, weights = HybridLM.abstract(ModelConfig.preset(name))
    total = sum(leaf.size for leaf in jax.tree.leaves(weights))
    assert total == pytest.approx(num_parameters, rel=0.0 if type(num_parameters) is int else 0.03)


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("Qwen3.5-9B", "gated_delta", 56_819_712),
        ("Kimi-Linear-48B-A3B", "gated_delta", 83_886_080),
        ("Kimi-Linear-48B-A3B", "latent_attention", 516_096),
        ("LFM2-1.2B", "short_conv", 2_621_440),
        ("LFM2-1.2B", "attention", 786_432),
    ],
)
def test_the_bytes_that_64_nodes_hold(name, kind, size):
    """As docs/algorithms.md says."""
    config = ModelConfig.preset(name)
    records = jax.eval_shape(lambda: init_pending(config, 1, 64, jnp.bfloat16))
    parts = [part for part, of in zip(records, config.kinds, strict=True) if of == kind]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts)) == size


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
    """Each layer has its own weights, although only one of its kind was traced."""
    structure, weights = HybridLM.abstract(CONFIGS[name])
    whole = nnx.eval_shape(lambda: HybridLM(CONFIGS[name], rngs=nnx.Rngs(0)))
    want = nnx.to_pure_dict(nnx.state(whole))
    assert jax.tree.map(jnp.shape, want) == jax.tree.map(jnp.shape, weights)
    model = nnx.merge(structure, want)
    assert model.config == CONFIGS[name]
    assert [block.kind for block in model.blocks] == list(CONFIGS[name].kinds)
