"""Bamba and Falcon-H1: transformers' `BambaConfig` and `FalconH1Config`."""

from dataclasses import replace
from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import tables
from stree_jax.convert.description import Description, Source, norm_kind, required
from stree_jax.convert.fields import Table, values_of
from stree_jax.convert.rules import Rule
from stree_jax.models.config import ModelConfig


def read_bamba(source: Source) -> Description:
    """`BambaConfig`. transformers applies RoPE to the first half of each head."""
    fields = source.fields
    fields.null("attn_layer_indices", "layer_types", "layers_block_type")
    mamba2, d_model = hybrid.read_mixer(fields)
    attention = hybrid.read_attention(fields, d_model)
    theta, scaling, table = fields.rope()
    table.check(
        table.number("partial_rotary_factor", 0.5) == 0.5,
        "partial_rotary_factor is not 0.5, which transformers always uses for Bamba",
    )
    fields.ignore("always 0.5", "partial_rotary_factor")
    table.finish()
    rotary_dim = attention.head_dim // 2
    fields.same("attn_rotary_emb", rotary_dim)  # present in the first conversions of Bamba
    num_layers = fields.num_layers(32)
    with_attention = fields.indices("attn_layer_indices", num_layers)
    kinds = tuple("attention" if i in with_attention else "mamba2" for i in range(num_layers))
    fields.alias(layer_types="layers_block_type")
    if fields.has("layer_types"):
        fields.check(
            fields.layer_kinds("layer_types", hybrid.KINDS, num_layers) == kinds,
            f"layer_types and attn_layer_indices = {with_attention!s:.80} are two names of one"
            " thing: leave the wrong one out",
        )
    fields.ignore("used in training only", "z_loss_coefficient")
    config = ModelConfig(
        layers=hybrid.with_mlps(kinds),
        mamba2=mamba2,
        attention=replace(attention, rotary_dim=rotary_dim, rope_theta=theta, rope_scaling=scaling),
        mlp=hybrid.read_mlp(fields),
        **hybrid.model_fields(fields, d_model),
    )
    return hybrid.described("transformers bamba", fields, config, _rules(config))


def _rules(config: ModelConfig) -> list[Rule]:
    """The rules of both families."""
    return tables.llama_like(
        config,
        mlp=tables.within(tables.split_mlp(hybrid.required(config, "mlp")), "feed_forward"),
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
    )


def write_bamba(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`BambaConfig`."""
    attention = hybrid.required(config, "attention")
    names = dtype, "bamba", "BambaForCausalLM"
    return (
        hybrid.usual_values(config, attention, *names, partial_rotary_factor=0.5)
        | hybrid.mixer_values(config)
        | hybrid.mlp_values(config)
        | {
            "attn_layer_indices": hybrid.positions_of(config.kinds[::2], "attention"),
        }
    )


_OF_MIXER: Table = dict(
    out_proj_bias=("projectors_bias", False),
    input_multiplier=("ssm_in_multiplier", 1.0),
    output_multiplier=("ssm_out_multiplier", 1.0),
)
_OF_ATTENTION: Table = dict(
    input_multiplier=("attention_in_multiplier", 1.0),
    key_multiplier=("key_multiplier", 1.0),
    output_multiplier=("attention_out_multiplier", 1.0),
)
_OF_MODEL: Table = dict(
    embedding_multiplier=("embedding_multiplier", 1.0),
    logits_multiplier=("lm_head_multiplier", 1.0),
)


def read_falcon_h1(source: Source) -> Description:
    """`FalconH1Config`: mixer and attention in parallel in every layer, and many multipliers."""
    fields = source.fields
    flags = ("mamba_norm_before_gate", "mamba_rms_norm", "projectors_bias", "mamba_proj_bias")
    fields.null("ssm_multipliers", "mlp_multipliers", **dict.fromkeys(flags, False))
    norm_first = fields.flag("mamba_norm_before_gate", True)
    norm = norm_kind(fields.flag("mamba_rms_norm", False), norm_first)
    d_model = fields.integer("hidden_size", 4096)
    fields.null(mamba_d_ssm=fields.integer("mamba_expand", 2) * d_model)
    mamba2, _ = hybrid.read_mixer(
        fields,
        inner=fields.integer("mamba_d_ssm", 1024),
        norm=norm,
        **fields.read(_OF_MIXER),
        section_multipliers=fields.numbers("ssm_multipliers", 5),
    )
    attention = hybrid.read_attention(fields, d_model, **fields.read(_OF_ATTENTION))
    gate, down = fields.numbers("mlp_multipliers", 2)
    num_layers = fields.num_layers(32)
    config = ModelConfig(
        layers=("parallel", "mlp") * num_layers,
        mamba2=mamba2,
        attention=hybrid.rotated(fields, attention),
        mlp=hybrid.read_mlp(fields, gate_multiplier=gate, output_multiplier=down),
        **fields.read(_OF_MODEL),
        **hybrid.model_fields(fields, d_model),
    )
    fields.ignore("all layers are alike", "layers_block_type", "layer_types", "attn_layer_indices")
    fields.ignore("always used", "mamba_use_mlp")
    fields.ignore("redundant with intermediate_size", "mlp_expansion_factor")
    fields.ignore(
        "used in training only",
        *("time_step_min", "time_step_max", "time_step_floor"),
        "time_step_rank",
    )
    return hybrid.described("transformers falcon_h1", fields, config, _rules(config))


def write_falcon_h1(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`FalconH1Config`."""
    m, a, mlp = (required(config, kind) for kind in ("mamba2", "attention", "mlp"))
    return (
        hybrid.usual_values(config, a, dtype, "falcon_h1", "FalconH1ForCausalLM")
        | hybrid.mixer_values(config)
        | hybrid.mlp_values(config)
        | values_of(m, _OF_MIXER)
        | values_of(a, _OF_ATTENTION)
        | values_of(config, _OF_MODEL)
        | {
            "mamba_d_ssm": m.inner_size,
            "mamba_rms_norm": m.norm != "none",
            "mamba_norm_before_gate": m.norm == "norm_then_gate",
            "mamba_proj_bias": m.in_proj_bias,
            "head_dim": a.head_dim,
            "ssm_multipliers": list(m.section_multipliers),
            "mlp_multipliers": [mlp.gate_multiplier, mlp.output_multiplier],
        }
    )
