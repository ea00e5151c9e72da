"""Configs as they are published, with every field, are understood.

Written down from the models' pages and from readers of other projects, without weights. Where there
is a preset it must say the same: two independent descriptions of one model.
"""

import dataclasses
import json
import math

import pytest

import stree_jax as st
from stree_jax.convert.families import describe

# Of every transformers config of its time.
COMMON = dict(
    architectures=["X"],
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.02,
    pad_token_id=0,
    torch_dtype="bfloat16",
    transformers_version="4.57.0",
    use_cache=True,
)

BAMBA_9B = COMMON | dict(
    model_type="bamba",
    attention_bias=False,
    attn_layer_indices=[9, 18, 27],
    attn_rotary_emb=64,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    mamba_chunk_size=256,
    mamba_conv_bias=True,
    mamba_d_conv=4,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=128,
    mamba_proj_bias=False,
    max_position_embeddings=4096,
    mlp_bias=False,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_logits_to_keep=1,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    vocab_size=128256,
    z_loss_coefficient=1e-4,
)

FALCON_H1_500M = COMMON | dict(
    model_type="falcon_h1",
    attention_bias=False,
    attention_in_multiplier=1.0,
    attention_out_multiplier=0.9375,
    attn_layer_indices=None,
    embedding_multiplier=5.656854249492381,
    head_dim=64,
    hidden_act="silu",
    hidden_size=1024,
    intermediate_size=2048,
    key_multiplier=0.390625,
    lm_head_multiplier=0.0390625,
    mamba_chunk_size=128,
    mamba_conv_bias=True,
    mamba_d_conv=4,
    mamba_d_head=64,
    mamba_d_ssm=1536,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=24,
    mamba_norm_before_gate=False,
    mamba_proj_bias=False,
    mamba_rms_norm=False,
    mamba_use_mlp=True,
    max_position_embeddings=16384,
    mlp_bias=False,
    mlp_expansion_factor=8,
    mlp_multipliers=[0.8838834764831844, 0.5859375],
    num_attention_heads=8,
    num_hidden_layers=36,
    num_key_value_heads=2,
    num_logits_to_keep=1,
    projectors_bias=False,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=100000000000.0,
    ssm_in_multiplier=1.25,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ssm_out_multiplier=0.23570226039551587,
    tie_word_embeddings=False,
    time_step_floor=1e-4,
    time_step_max=0.1,
    time_step_min=0.001,
    time_step_rank="auto",
    vocab_size=32784,
)

GRANITE_350M = COMMON | dict(
    model_type="granitemoehybrid",
    attention_bias=False,
    attention_multiplier=0.015625,
    embedding_multiplier=12,
    hidden_act="silu",
    hidden_size=768,
    init_method="mup",
    intermediate_size=2048,
    layer_types=["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    logits_scaling=3,
    mamba_chunk_size=256,
    mamba_conv_bias=True,
    mamba_d_conv=4,
    mamba_d_head=32,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=48,
    mamba_proj_bias=False,
    max_position_embeddings=32768,
    normalization_function="rmsnorm",
    num_attention_heads=12,
    num_experts_per_tok=0,
    num_hidden_layers=32,
    num_key_value_heads=4,
    num_local_experts=0,
    output_router_logits=False,
    position_embedding_type="nope",
    residual_multiplier=0.246,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=10000,
    router_aux_loss_coef=0.0,
    shared_intermediate_size=2048,
    tie_word_embeddings=True,
    vocab_size=100352,
)

_NEMOTRON = COMMON | dict(
    model_type="nemotron_h",
    attention_bias=False,
    auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    chunk_size=128,
    conv_kernel=4,
    expand=2,
    hidden_dropout=0.0,
    layer_norm_epsilon=1e-5,
    mamba_hidden_act="silu",
    mamba_proj_bias=False,
    mlp_bias=False,
    mlp_hidden_act="relu2",
    n_groups=8,
    num_logits_to_keep=1,
    rescale_prenorm_residual=True,
    residual_in_fp32=False,
    sliding_window=None,
    ssm_state_size=128,
    tie_word_embeddings=False,
    time_step_floor=1e-4,
    time_step_limit=[0.0, math.inf],
    time_step_max=0.1,
    time_step_min=0.001,
    time_step_rank=256,
    use_bias=False,
    use_conv_bias=True,
    use_mamba_kernels=True,
    vocab_size=131072,
)

NEMOTRON_H_8B = _NEMOTRON | dict(
    attention_head_dim=128,
    hidden_size=4096,
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    intermediate_size=21504,
    mamba_head_dim=64,
    mamba_num_heads=128,
    max_position_embeddings=8192,
    num_attention_heads=32,
    num_hidden_layers=52,
    num_key_value_heads=8,
    num_query_groups=8,
    rms_norm_eps=1e-5,
)

NEMOTRON_3_NANO = _NEMOTRON | dict(
    head_dim=128,
    hidden_size=2688,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    intermediate_size=1856,
    mamba_head_dim=64,
    mamba_num_heads=64,
    max_position_embeddings=262144,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    n_group=1,
    n_routed_experts=128,
    n_shared_experts=1,
    norm_eps=1e-5,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts_per_tok=6,
    num_hidden_layers=52,
    num_key_value_heads=2,
    partial_rotary_factor=1.0,
    rope_theta=10000,
    routed_scaling_factor=2.5,
    topk_group=1,
)

ZAMBA2_2B = COMMON | dict(
    model_type="zamba2",
    adapter_rank=128,
    add_bias_linear=False,
    attention_head_dim=160,
    attention_hidden_size=5120,
    chunk_size=256,
    hidden_act="gelu",
    hidden_size=2560,
    hybrid_layer_ids=[6, 12, 18, 24, 30, 36, 42, 47, 51],
    intermediate_size=10240,
    kv_channels=80,
    layers_block_type=[
        "hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for i in range(54)
    ],
    mamba_d_conv=4,
    mamba_d_state=64,
    mamba_expand=2,
    mamba_headdim=64,
    mamba_ngroups=1,
    max_position_embeddings=4096,
    n_mamba_heads=80,
    num_attention_heads=32,
    num_hidden_layers=54,
    num_key_value_heads=32,
    num_logits_to_keep=1,
    num_mem_blocks=2,
    num_query_groups=32,
    rms_norm_eps=1e-5,
    rope_theta=10000,
    time_step_floor=1e-4,
    time_step_limit=None,
    time_step_max=0.1,
    time_step_min=0.001,
    use_conv_bias=True,
    use_long_context=False,
    use_mamba_kernels=True,
    use_mem_eff_path=False,
    use_mem_rope=False,
    use_shared_attention_adapter=False,
    vocab_size=32000,
)

MAMBA2ATTN = {
    "d_model": 2560,
    "d_intermediate": 0,
    "n_layer": 64,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [9, 18, 27, 36, 45, 56],
    "attn_cfg": {
        "causal": True,
        "d_conv": 4,
        "head_dim": 128,
        "num_heads": 30,
        "out_proj_bias": False,
        "qkv_proj_bias": False,
        "rotary_emb_dim": 64,
    },
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


def read(tmp_path, values, **beside):
    for name, file in beside.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    path = tmp_path / "config.json"
    return describe(path, json.loads(json.dumps(values)), {}).config


def shape(config):
    """What a preset is asked for: everything but scales, limits and tokens."""
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
        (FALCON_H1_500M, "Falcon-H1-0.5B"),
        (GRANITE_350M, "Granite-4-H-350M"),
        (NEMOTRON_H_8B, "Nemotron-H-8B"),
        (NEMOTRON_3_NANO, "Nemotron-3-Nano-30B"),
        (ZAMBA2_2B, "Zamba2-2.7B"),
    ],
)
def test_the_preset_says_the_same(values, preset, tmp_path):
    assert shape(read(tmp_path, values)) == shape(st.ModelConfig.preset(preset))


def test_falcons_multipliers(tmp_path):
    config = read(tmp_path, FALCON_H1_500M)
    assert config.mamba2.output_multiplier == 0.23570226039551587
    assert config.mlp.gate_multiplier == 0.8838834764831844
    assert config.attention.key_multiplier == 0.390625
    assert config.logits_multiplier == 0.0390625


@pytest.mark.parametrize(
    ("values", "num_parameters"),
    [(BAMBA_9B, 9.78e9), (NEMOTRON_3_NANO, 31.6e9), (ZAMBA2_2B, 2.69e9), (MAMBA2ATTN, 2.7e9)],
)
def test_the_number_of_parameters(values, num_parameters, tmp_path):
    from stree_jax.convert.rules import check_coverage
    from stree_jax.convert.tensors import Tensor

    config = read(tmp_path, values)
    _, weights = st.HybridLM.abstract(config)
    leaves = st.checkpoint.flatten(weights)
    assert sum(leaf.size for leaf in leaves.values()) == pytest.approx(num_parameters, rel=0.02)
    # The table has a rule for every weight, of a shape that the transforms can make.
    import numpy as np

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


LLAMA_3_1_8B = COMMON | dict(
    model_type="llama",
    attention_bias=False,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_scaling={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    rope_theta=500000.0,
    tie_word_embeddings=False,
    vocab_size=128256,
)


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
    config = read(tmp_path, LLAMA_3_1_8B, mamba_config=mamba_config)
    assert shape(config) == shape(st.ModelConfig.preset("MambaInLlama-8B"))
    assert config.max_length == 131072
    assert config.eos_token == (128001, 128008, 128009)


def test_the_draft_of_stree(tmp_path):
    """Its config.json says of attention what belongs to another model."""
    llama = LLAMA_3_1_8B | dict(
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
