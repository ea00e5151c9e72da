"""Refusals of configs and models."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from stree_jax import HybridLM, ModelConfig, demo_path
from stree_jax.models import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
    ShortConvConfig,
)
from stree_jax.models.layer import LayerConfig, register
from stree_jax.testing import HYBRIDS
from tests.helpers import by_message, refusal

SMALL = {"vocab_size": 5, "d_model": 4}
NO_MEMORY = ModelConfig(vocab_size=9, d_model=8, layers=("mlp",), mlp=MlpConfig(8))


def tiny(**changes):
    return partial(ModelConfig.tiny, **changes)


def table(values):
    """A native config.json."""
    return partial(ModelConfig.from_dict, values)


def zamba2(*layers, **parts):
    return partial(HYBRIDS["zamba2"].with_layers, layers, **parts)


def rotary(**changes):
    return partial(AttentionConfig, 1, 1, 128, rotary_dim=128, **changes)


def model(config=None, **options):
    return partial(HybridLM, config or ModelConfig.tiny(), rngs=nnx.Rngs(0), **options)


REFUSED = [
    (tiny(num_groups=3), "num_groups = 3 does not divide num_heads = 4"),
    (tiny(conv_width=1), "conv_width must be an integer, at least 2; got 1"),
    (tiny(dt_limit=(1.0, 0.5)), "dt_limit"),
    (tiny(norm="layer"), "norm must be one of .*'layer'"),
    (tiny(head_dim=5), "head_dim = 5 does not divide expand \\* d_model = 32"),
    (tiny(vocab_size=0), "vocab_size must be an integer, at least 1; got 0"),
    (tiny(padded_vocab_size=3), "padded_vocab_size = 3 is below vocab_size = 37"),
    (
        table(SMALL | {"layers": ["mamba2"], "mamba2": {"activation": "gelu"}}),
        "activation must be 'silu', got 'gelu'",
    ),
    (tiny(norm_groups=5), "norm_groups = 5 does not divide"),
    (tiny(eos_token=37), "eos_token = 37 is outside the vocabulary of 37"),
    (tiny(num_layers=0), "num_layers must be an integer, from 1 to 8192; got 0"),
    (tiny(num_x_heads=0), "num_x_heads must be an integer, at least 1; got 0"),
    (tiny(head_dim=0), "head_dim must be an integer, at least 1; got 0"),
    (tiny(norm_eps=0.0), "norm_eps must be above 0, got 0.0"),
    (tiny(state_size=1 << 60), "state_size must be below 2\\*\\*31, got 1152921504606846976"),
    (tiny(conv_width=1 << 24), "conv_width must be below 2\\*\\*10, got 16777216"),
    (partial(AttentionConfig, 1, 1, 8, conv_width=1 << 24), "conv_width must be below 2\\*\\*10"),
    (table(SMALL | {"layers": ["mlp"] * 9000}), "layers has 9000 entries; at most 8192"),
    (tiny(mlp={"width": 24}), "MlpConfig has no fields .'width'."),
    (table(SMALL | {"layers": ["mamba2"], "colour": 1}), "no fields \\['colour'\\]"),
    (table(SMALL | {"layers": ["rwkv"]}), "unknown layer kinds \\['rwkv'\\]"),
    *(
        (lambda kind=kind: register(kind), f"the name of a layer kind is a text .*, got {kind!r}")
        for kind in (5, None, "", " ")
    ),
    (lambda: register("novel")(dict), "the layer kind 'novel' must be a LayerConfig, got <class"),
    (partial(ModelConfig, **SMALL, layers=[LayerConfig()]), "LayerConfig is no registered kind"),
    (table(SMALL | {"layers": ["mamba2"]}), "mamba2 config is missing"),
    (table({"vocab_size": 5}), "missing"),
    (table({"vocab_size": "five", "d_model": 4, "layers": ["mlp"]}), "vocab_size"),
    (table(SMALL | {"layers": [], "mamba2": {"num_heads": 2}}), "head_dim"),
    (table(None), "is a table of fields, got None"),
    (table(SMALL | {"layers": "mamba2"}), "layers must be tuple"),
    (table(SMALL | {"layers": [[]]}), "layers must be tuple"),
    (zamba2("mamba2", "shared"), "to a 'mamba2' layer, which must come next"),
    (zamba2("shared", "mamba2", shared=None), "the shared config is missing"),
    (zamba2("mamba2", "attention"), "input_multiple is 2 in a model with 'shared' layers"),
    (rotary(rope_theta=1e-200), "give infinite frequencies"),
    (rotary(rope_scaling=RopeScaling(1e-200, 1.0, 2.0, 1)), "give infinite frequencies"),
    (partial(AttentionConfig, 4, 3, 8), "num_kv_heads = 3 does not divide num_heads = 4"),
    (partial(AttentionConfig, 4, 2, 8, 1, None, 5), "rotary_dim must be even and at most head_dim"),
    (partial(MlpConfig, 8, "tanh"), "activation must be one of .*'tanh'"),
    (partial(MoeConfig, 4, 5, 8), "num_active = 5 is more than the 4 experts"),
    (partial(MoeConfig, 4, 2, 8, "best"), "router must be one of .*'best'"),
    (partial(MoeConfig, 4, 2, 8, "sigmoid", 3), "3 groups of 4 experts is not possible"),
    (partial(MoeConfig, 4, 2, 8, norm_eps=-1.0), "norm_eps must be at least 0, got -1.0"),
    (partial(MoeConfig, 4, 2, 8, shared_limit=-1.0), "limit must be above 0, in a gated"),
    (partial(MlpConfig, 8, gated=False, limit=7.0), "limit must be above 0, .*; got 7.0"),
    (partial(LatentAttentionConfig, 4, 16, 8, 8, 3, 1e4), "rotary_dim must be even .* got 3"),
    (partial(LatentAttentionConfig, 4, 16, 8, 8, 4, 0.0), "rope_theta must be above 0, got 0.0"),
    (partial(GatedDeltaConfig, 4, 8, 4, 8, gate_rank=2), "gate_rank = 2 .* need by_channel = True"),
    (partial(ShortConvConfig, 0), "num_channels must be an integer, at least 1; got 0"),
    (partial(ShortConvConfig, 8, 1), "conv_width must be an integer, at least 2; got 1"),
    (partial(AttentionConfig, 4, 2, 8, qk_norm_spans=True), "qk_norm_spans = True needs qk_norm_e"),
    (
        lambda: HYBRIDS["falcon_h1"].with_layers(
            ["parallel"], attention=AttentionConfig(4, 2, 8, norm_after=True)
        ),
        "norm_after is for layers, not for parts of a 'parallel' layer",
    ),
    (partial(RopeScaling, 8.0, 4.0, 1.0, 9), "0 < low_freq_factor < high_freq_factor"),
    (partial(SharedConfig, 0, 4), "num_blocks must be an integer, at least 1; got 0"),
    (model(NO_MEMORY), "no memory of other tokens"),
    (model(dtype="float16"), "float32 or bfloat16, got float16"),
    (model(implementation="jax_triton"), "jax_triton'; names that only some ops know"),
    (model(implementation="cuda"), "must be one of .* got 'cuda'"),
    (partial(ModelConfig.preset, "mamba3"), r"unknown preset 'mamba3'; known: .*mamba2-130m"),
    (partial(demo_path, "teacher"), r"'draft', 'medusa'\), got 'teacher'"),
]


@by_message(("call", "message"), REFUSED)
def test_refused(call, message):
    refusal(message, call)


def test_integers_in_fields_of_floats_are_floats():
    """jax would take 2**31 for an int32, which it does not fit."""
    values = HYBRIDS["bamba"].to_dict() | {"embedding_multiplier": 1 << 31}
    values["configs"]["mamba2"]["input_multiplier"] = 1 << 31
    values["configs"]["attention"]["scale"] = 1 << 31
    config = ModelConfig.from_dict(values)
    numbers = config.embedding_multiplier, config.mamba2.input_multiplier, config.attention.scale
    assert {*map(type, numbers)} == {float}
    assert config == ModelConfig.from_dict(config.to_dict())
    model = HybridLM(config, rngs=nnx.Rngs(0))
    jax.eval_shape(model, jax.ShapeDtypeStruct((1, 3), jnp.int32))
