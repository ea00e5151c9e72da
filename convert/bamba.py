"""Bamba and Falcon-H1, as transformers' `BambaConfig` and `FalconH1Config` describe them."""

from typing import Any

from stree_jax.config import ModelConfig
from stree_jax.convert import tables
from stree_jax.convert.description import Description, hf_values, mixer_of, norm_kind
from stree_jax.convert.fields import MAX_LAYERS, Fields
from stree_jax.convert.hybrid_parts import (
    attention_of,
    attention_of_fields,
    attention_values,
    finished,
    gated_mlp,
    mamba2_mixer,
    mamba2_values,
    max_length_of,
    pairs,
    positions_of,
    present,
    rope_values,
    rotated,
    whole_model,
)
from stree_jax.convert.rules import Rule


def read_bamba(fields: Fields) -> Description:
    """`BambaConfig`; RoPE on the first half of each head, whatever the config says."""
    mamba2, d_model = mamba2_mixer(fields)
    attention = attention_of_fields(fields, d_model)
    theta, scaling, table = fields.rope()
    table.check(
        table.number("partial_rotary_factor", 0.5) == 0.5,
        "partial_rotary_factor is not 0.5, which transformers always uses for Bamba",
    )
    fields.ignore("always 0.5", "partial_rotary_factor")
    table.finish()
    fields.same("attn_rotary_emb", attention.head_dim // 2)  # of Bamba's first conversions
    num_layers = fields.integer("num_hidden_layers", 32, most=MAX_LAYERS)
    with_attention = fields.indices("attn_layer_indices", num_layers)
    kinds = ["attention" if i in with_attention else "mamba2" for i in range(num_layers)]
    fields.ignore("said by attn_layer_indices", "layers_block_type", "layer_types")
    fields.ignore("of training", "z_loss_coefficient")
    config = ModelConfig(
        layers=pairs(kinds, "mlp"),
        mamba2=mamba2,
        attention=rotated(attention, attention.head_dim // 2, theta, scaling),
        mlp=gated_mlp(fields),
        max_length=max_length_of(fields),
        **whole_model(fields, d_model),
    )
    return finished("transformers bamba", fields, config, _rules(config))


def _rules(config: ModelConfig) -> list[Rule]:
    """Names of the tensors of both families."""
    return tables.llama_like(
        config,
        mlp=tables.split_mlp(present(config.mlp)),
        mlp_name="feed_forward",
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
    )


def write_bamba(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `BambaConfig`."""
    attention = attention_of(config)
    return (
        hf_values(config, "bamba", "BambaForCausalLM")
        | mamba2_values(config)
        | attention_values(config)
        | rope_values(attention, partial_rotary_factor=0.5)
        | {
            "num_hidden_layers": len(config.layers) // 2,
            "attn_layer_indices": positions_of(config.layers[::2], "attention"),
            "intermediate_size": present(config.mlp).hidden_size,
            "hidden_act": present(config.mlp).activation,
            "mlp_bias": present(config.mlp).bias,
            "max_position_embeddings": config.max_length,
        }
    )


def read_falcon_h1(fields: Fields) -> Description:
    """`FalconH1Config`: mixer and attention side by side in every layer, and many multipliers."""
    norm_first = fields.flag("mamba_norm_before_gate", True)
    norm = norm_kind(fields.flag("mamba_rms_norm", False), norm_first)
    d_model = fields.integer("hidden_size", 4096)
    inner = fields.integer("mamba_expand", 2) * d_model
    if "mamba_d_ssm" not in fields.values or fields.has("mamba_d_ssm"):
        inner = fields.integer("mamba_d_ssm", 1024)
    mamba2, _ = mamba2_mixer(
        fields,
        inner=inner,
        norm=norm,
        out_proj_bias=fields.flag("projectors_bias", False),
        input_multiplier=fields.number("ssm_in_multiplier", 1.0),
        output_multiplier=fields.number("ssm_out_multiplier", 1.0),
        section_multipliers=fields.numbers("ssm_multipliers", 5),
    )
    attention = attention_of_fields(
        fields,
        d_model,
        input_multiplier=fields.number("attention_in_multiplier", 1.0),
        key_multiplier=fields.number("key_multiplier", 1.0),
        output_multiplier=fields.number("attention_out_multiplier", 1.0),
    )
    theta, scaling, table = fields.rope()
    table.finish()
    gate, down = fields.numbers("mlp_multipliers", 2)
    num_layers = fields.integer("num_hidden_layers", 32, most=MAX_LAYERS)
    config = ModelConfig(
        layers=("parallel", "mlp") * num_layers,
        mamba2=mamba2,
        attention=rotated(attention, attention.head_dim, theta, scaling),
        mlp=gated_mlp(fields, gate_multiplier=gate, output_multiplier=down),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
        max_length=max_length_of(fields),
        **whole_model(fields, d_model),
    )
    fields.ignore("all layers are alike", "layers_block_type", "layer_types", "attn_layer_indices")
    fields.ignore("always used", "mamba_use_mlp")
    fields.ignore("said by intermediate_size", "mlp_expansion_factor")
    fields.ignore(
        "of training", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"
    )
    return finished("transformers falcon_h1", fields, config, _rules(config))


def write_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `FalconH1Config`."""
    m, a, mlp = mixer_of(config), attention_of(config), present(config.mlp)
    return (
        hf_values(config, "falcon_h1", "FalconH1ForCausalLM")
        | mamba2_values(config)
        | attention_values(config)
        | rope_values(a)
        | {
            "num_hidden_layers": len(config.layers) // 2,
            "mamba_d_ssm": m.inner_size,
            "mamba_rms_norm": m.norm != "none",
            "mamba_norm_before_gate": m.norm == "norm_then_gate",
            "projectors_bias": m.out_proj_bias,
            "head_dim": a.head_dim,
            "intermediate_size": mlp.hidden_size,
            "hidden_act": mlp.activation,
            "mlp_bias": mlp.bias,
            "embedding_multiplier": config.embedding_multiplier,
            "lm_head_multiplier": config.logits_multiplier,
            "key_multiplier": a.key_multiplier,
            "attention_in_multiplier": a.input_multiplier,
            "attention_out_multiplier": a.output_multiplier,
            "ssm_in_multiplier": m.input_multiplier,
            "ssm_out_multiplier": m.output_multiplier,
            "ssm_multipliers": list(m.section_multipliers),
            "mlp_multipliers": [mlp.gate_multiplier, mlp.output_multiplier],
            "max_position_embeddings": config.max_length,
        }
    )
