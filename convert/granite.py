"""Granite-4-H: transformers' `GraniteMoeHybridConfig`."""

from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import tables
from stree_jax.convert.description import Description, Source
from stree_jax.models import MlpConfig, MoeConfig
from stree_jax.models.config import ModelConfig


def read_granite(source: Source) -> Description:
    """`GraniteMoeHybridConfig`, dense or with experts."""
    fields = source.fields
    mamba2, d_model = hybrid.read_mixer(fields, eps_default=1e-6)
    fields.null("layer_types", "layers_block_type", "position_embedding_type")
    heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", max(1, d_model // heads))
    fields.null(attention_multiplier=head_dim**-0.5)
    attention = hybrid.read_attention(
        fields, d_model, scale=fields.number("attention_multiplier", 1.0)
    )
    rotated = hybrid.rotated(fields, attention)
    positions = fields.choice("position_embedding_type", "nope", {"rope": "rope", "nope": "nope"})
    has_rope = positions == "rope"
    num_layers = fields.num_layers(32)
    fields.alias(layer_types="layers_block_type")
    kinds = fields.layer_kinds("layer_types", hybrid.KINDS, num_layers, ["mamba"] * num_layers)
    num_experts = fields.integer("num_local_experts", 8, least=0)
    shared_size = fields.integer("shared_intermediate_size", 1024)
    num_active = fields.integer("num_experts_per_tok", 2, least=0)
    expert_size = fields.integer("intermediate_size", 11008)
    activation = fields.choice("hidden_act", "silu", hybrid.SILU)
    config = ModelConfig(
        layers=hybrid.with_mlps(kinds, "moe" if num_experts else "mlp"),
        mamba2=mamba2,
        attention=rotated if has_rope else attention,
        mlp=None if num_experts else MlpConfig(shared_size, activation=activation),
        moe=MoeConfig(
            num_experts, num_active, expert_size, shared_size=shared_size, activation=activation
        )
        if num_experts
        else None,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1 / fields.positive("logits_scaling", 1.0),
        **hybrid.model_fields(fields, d_model, eps_default=1e-6, limited=has_rope),
    )
    fields.ignore("never read by transformers", "normalization_function", "init_method", "mlp_bias")
    in_memory = any(name.endswith(tables.GRANITE_NAMES[1]) for name in source.tensors)
    experts = tables.granite_experts(tables.GRANITE_NAMES[in_memory])
    rules = tables.llama_like(
        config,
        mlp=experts if num_experts else tables.within(tables.GRANITE_MLP, "shared_mlp"),
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
    )
    return hybrid.described("transformers granitemoehybrid", fields, config, rules)


def write_granite(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`GraniteMoeHybridConfig`."""
    a, moe = hybrid.required(config, "attention"), config.moe
    after = hybrid.required(config, "mlp" if moe is None else "moe")
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 1}
    if moe is not None:
        experts = {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "intermediate_size": moe.hidden_size,
        }
    shared = after.hidden_size if moe is None else moe.shared_size
    return (
        hybrid.usual_values(config, a, dtype, "granitemoehybrid", "GraniteMoeHybridForCausalLM")
        | hybrid.mixer_values(config)
        | experts
        | {
            "layer_types": [hybrid.NAMES.get(kind, kind) for kind in config.kinds[::2]],
            "shared_intermediate_size": shared,
            "hidden_act": after.activation,
            "position_embedding_type": "rope" if a.rotary_dim else "nope",
            "attention_multiplier": a.score_scale,
            "embedding_multiplier": config.embedding_multiplier,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": hybrid.reciprocal(config.logits_multiplier),
            "max_position_embeddings": config.max_length or 1 << 17,
        }
    )
