"""transformers' hybrids of Mamba-2 and attention, and MambaInLlama.

Each family has a function that reads its config and one that writes it. Writers put down what the
family can say; whether that was all is seen by reading it back (`families.config_for`).

Sources: transformers' configuration and modeling files, and MambaInLlama's `MambaConfig`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from stree_jax.config import ModelConfig
from stree_jax.convert import tables
from stree_jax.convert.description import (
    Description,
    hf_values,
    limits,
    mixer_of,
    norm_kind,
    tied_head,
)
from stree_jax.convert.fields import MAX_LAYERS, TRANSFORMERS, Fields
from stree_jax.convert.rules import Ignored
from stree_jax.convert.tensors import Tensor
from stree_jax.layer_config import (
    AttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
)

# transformers 4 and 5 call them differently.
_KINDS = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "hybrid": "shared",
    "mlp": "mlp",
    "moe": "moe",
}
_NAMES = {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"}
_SILU = {"silu": "silu", "swish": "silu"}


# --- Bamba.


def read_bamba(fields: Fields) -> Description:
    """`BambaConfig`; RoPE on the first half of each head, whatever the config says."""
    mamba2, d_model = _mamba2(fields)
    attention = _attention(fields, d_model)
    theta, scaling, table = fields.rope()
    table.check(
        table.number("partial_rotary_factor", 0.5) == 0.5,
        "partial_rotary_factor is not 0.5, which transformers always uses for Bamba",
    )
    fields.ignore("always 0.5", "partial_rotary_factor")
    table.finish()
    num_layers = fields.integer("num_hidden_layers", 32, most=MAX_LAYERS)
    with_attention = fields.indices("attn_layer_indices", num_layers)
    kinds = ["attention" if i in with_attention else "mamba2" for i in range(num_layers)]
    fields.ignore("said by attn_layer_indices", "layers_block_type", "layer_types")
    fields.ignore("of training", "z_loss_coefficient")
    config = ModelConfig(
        layers=_pairs(kinds, "mlp"),
        mamba2=mamba2,
        attention=_rotated(attention, attention.head_dim // 2, theta, scaling),
        mlp=_gated_mlp(fields),
        max_length=_max_length(fields),
        **_model(fields, d_model),
    )
    rules = tables.llama_like(
        config,
        mlp=tables.split_mlp(_present(config.mlp)),
        mlp_name="feed_forward",
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
    )
    return _finish("transformers bamba", fields, config, rules)


def write_bamba(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `BambaConfig`."""
    attention = _attention_of(config)
    return (
        hf_values(config, "bamba", "BambaForCausalLM")
        | _mamba2_values(config)
        | _attention_values(config)
        | _rope_values(attention, partial_rotary_factor=0.5)
        | {
            "num_hidden_layers": len(config.layers) // 2,
            "attn_layer_indices": _positions(config.layers[::2], "attention"),
            "intermediate_size": _present(config.mlp).hidden_size,
            "hidden_act": _present(config.mlp).activation,
            "mlp_bias": _present(config.mlp).bias,
            "max_position_embeddings": config.max_length,
        }
    )


# --- Falcon-H1.


def read_falcon_h1(fields: Fields) -> Description:
    """`FalconH1Config`: mixer and attention side by side in every layer, and many multipliers."""
    norm_first = fields.flag("mamba_norm_before_gate", True)
    norm = norm_kind(fields.flag("mamba_rms_norm", False), norm_first)
    d_model = fields.integer("hidden_size", 4096)
    inner = fields.integer("mamba_expand", 2) * d_model
    if "mamba_d_ssm" not in fields.values or fields.has("mamba_d_ssm"):
        inner = fields.integer("mamba_d_ssm", 1024)
    mamba2, _ = _mamba2(
        fields,
        inner=inner,
        norm=norm,
        out_proj_bias=fields.flag("projectors_bias", False),
        input_multiplier=fields.number("ssm_in_multiplier", 1.0),
        output_multiplier=fields.number("ssm_out_multiplier", 1.0),
        section_multipliers=fields.numbers("ssm_multipliers", 5),
    )
    attention = _attention(
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
        attention=_rotated(attention, attention.head_dim, theta, scaling),
        mlp=_gated_mlp(fields, gate_multiplier=gate, output_multiplier=down),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
        max_length=_max_length(fields),
        **_model(fields, d_model),
    )
    fields.ignore("all layers are alike", "layers_block_type", "layer_types", "attn_layer_indices")
    fields.ignore("always used", "mamba_use_mlp")
    rules = tables.llama_like(
        config,
        mlp=tables.split_mlp(_present(config.mlp)),
        mlp_name="feed_forward",
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
    )
    return _finish("transformers falcon_h1", fields, config, rules)


def write_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `FalconH1Config`."""
    m, a, mlp = mixer_of(config), _attention_of(config), _present(config.mlp)
    return (
        hf_values(config, "falcon_h1", "FalconH1ForCausalLM")
        | _mamba2_values(config)
        | _attention_values(config)
        | _rope_values(a)
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


# --- Granite-4-H.


def read_granite(fields: Fields) -> Description:
    """`GraniteMoeHybridConfig`, dense or with experts."""
    mamba2, d_model = _mamba2(fields, eps_default=1e-6)
    attention = _attention(fields, d_model, scale=fields.number("attention_multiplier", 1.0))
    theta, scaling, table = fields.rope()
    table.finish()
    has_rope = fields.take("position_embedding_type", "nope") == "rope"
    num_layers = fields.integer("num_hidden_layers", 32, most=MAX_LAYERS)
    fields.alias(layer_types="layers_block_type")
    kinds: tuple[str, ...] = ("mamba2",) * num_layers
    if fields.has("layer_types"):
        kinds = fields.layer_kinds("layer_types", {k: v for k, v in _KINDS.items() if v in _NAMES})
        fields.check(
            len(kinds) == num_layers,
            f"layer_types has {len(kinds)} entries for num_hidden_layers = {num_layers}",
        )
    num_experts = fields.integer("num_local_experts", 8, least=0)
    shared_size = fields.integer("shared_intermediate_size", 1024)
    num_active = fields.integer("num_experts_per_tok", 2, least=0)
    expert_size = fields.integer("intermediate_size", 11008)
    activation = fields.choice("hidden_act", "silu", _SILU)
    config = ModelConfig(
        layers=_pairs(kinds, "moe" if num_experts else "mlp"),
        mamba2=mamba2,
        attention=_rotated(attention, attention.head_dim, theta, scaling)
        if has_rope
        else attention,
        mlp=None if num_experts else MlpConfig(shared_size, activation=activation),
        moe=MoeConfig(
            num_experts,
            num_active,
            expert_size,
            shared_size=shared_size,
            activation=activation,
        )
        if num_experts
        else None,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1 / fields.positive("logits_scaling", 1.0),
        max_length=_max_length(fields) if has_rope else None,
        **_model(fields, d_model, eps_default=1e-6),
    )
    fields.ignore("without RoPE there is no limit", "max_position_embeddings")
    fields.ignore("never read by transformers", "normalization_function", "init_method", "mlp_bias")
    rules = tables.llama_like(
        config,
        mlp=tables.GRANITE_EXPERTS if num_experts else tables.GRANITE_MLP,
        mlp_name=None if num_experts else "shared_mlp",
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
    )
    return _finish("transformers granitemoehybrid", fields, config, rules)


def write_granite(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `GraniteMoeHybridConfig`."""
    a, mlp, moe = _attention_of(config), config.mlp, config.moe
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 1}
    if moe is not None:
        experts = {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "intermediate_size": moe.hidden_size,
        }
    shared = moe.shared_size if moe is not None else _present(mlp).hidden_size
    return (
        hf_values(config, "granitemoehybrid", "GraniteMoeHybridForCausalLM")
        | _mamba2_values(config)
        | _attention_values(config)
        | _rope_values(a)
        | experts
        | {
            "num_hidden_layers": len(config.layers) // 2,
            "layer_types": [_NAMES.get(kind, kind) for kind in config.layers[::2]],
            "shared_intermediate_size": shared,
            "hidden_act": _present(mlp or moe).activation,
            "position_embedding_type": "rope" if a.rotary_dim else "nope",
            "attention_multiplier": a.score_scale,
            "embedding_multiplier": config.embedding_multiplier,
            "residual_multiplier": config.residual_multiplier,
            "logits_scaling": _inverse(config.logits_multiplier),
            "max_position_embeddings": config.max_length or 1 << 17,
        }
    )


# --- Nemotron-H.

_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


def read_nemotron_h(
    fields: Fields, tensors: Mapping[str, Tensor], quirks: Collection[str]
) -> Description:
    """`NemotronHConfig`: one sub-layer a layer, no RoPE."""
    fields.alias(
        n_groups="mamba_n_groups",
        conv_kernel="mamba_d_conv",
        expand="mamba_expand",
        time_step_min="mamba_dt_min",
        time_step_max="mamba_dt_max",
        time_step_limit="mamba_dt_limit",
        time_step_floor="mamba_dt_init_floor",
        use_conv_bias="mamba_conv_bias",
        chunk_size="mamba_chunk_size",
        head_dim="attention_head_dim",
        layers_block_type="layer_types",
    )
    d_model = fields.integer("hidden_size", 4096)
    layers = _nemotron_layers(fields)
    bias = fields.flag("use_bias", False)
    fields.check(
        not fields.flag("attention_bias", False),
        "attention_bias = true, but transformers' NemotronHAttention never has a bias",
    )
    epsilon = fields.positive("layer_norm_epsilon", 1e-5)
    floor = fields.number("time_step_min", 1e-3)
    mamba2 = Mamba2Config(
        num_heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        state_size=fields.integer("ssm_state_size", 128),
        num_groups=fields.integer("n_groups", 8),
        conv_width=fields.integer("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        in_proj_bias=bias,
        out_proj_bias=bias,
        dt_limit=_dt_limit(fields, floor, quirks),
        norm_eps=epsilon,
        activation=fields.choice("mamba_hidden_act", "silu", _SILU),
        chunk_size=fields.integer("chunk_size", 128),
    )
    num_heads = fields.integer("num_attention_heads", 32)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", 128),
    )
    activation = fields.choice(
        "mlp_hidden_act", "relu2", {"relu2": "relu2", "silu": "silu", "gelu": "gelu"}
    )
    mlp_bias = fields.flag("mlp_bias", False)
    config = ModelConfig(
        layers=layers,
        mamba2=mamba2,
        attention=attention if "attention" in layers else None,
        mlp=MlpConfig(
            fields.integer("intermediate_size", 21504),
            activation=activation,
            gated=False,
            bias=mlp_bias,
        )
        if "mlp" in layers
        else None,
        moe=_nemotron_experts(fields, activation) if "moe" in layers else None,
        residual_float32=fields.flag("residual_in_fp32", False),
        **_model(fields, d_model, epsilon=epsilon, residual=True),
    )
    fields.check(
        not (mlp_bias and "moe" in layers), "mlp_bias = true with experts is not supported"
    )
    sliding = fields.take("sliding_window", 0)
    fields.check(sliding == 0, f"sliding_window = {sliding!r} is not supported")
    fields.ignore("transformers reads use_bias instead", "mamba_proj_bias")
    fields.ignore("d_ssm is mamba_num_heads * mamba_head_dim", "expand")
    fields.ignore("no layer has it", *_NEMOTRON_EXPERTS, "intermediate_size")
    fields.ignore("without RoPE there is no limit", "max_position_embeddings", *_ROPE)
    fields.ignore(
        "of training",
        "hidden_dropout",
        "initializer_range",
        "rescale_prenorm_residual",
        "time_step_max",
        "time_step_floor",
        "time_step_rank",
    )
    fields.ignore("of kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap")
    fields.ignore(
        "multi-token prediction heads are left out",
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
    )
    skipped = [
        Ignored(name, "of a multi-token prediction head")
        for name in tensors
        if name.startswith(("mtp.", "backbone.mtp.", "model.mtp."))
    ]
    rules = tables.nemotron_h(config)
    return _finish("transformers nemotron_h", fields, config, rules, skipped)


_NEMOTRON_EXPERTS = (
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
)


def _nemotron_layers(fields: Fields) -> tuple[str, ...]:
    """The kinds of the layers: a list, or a string with a letter for each."""
    if fields.has("layers_block_type"):
        fields.ignore("said by layers_block_type", "hybrid_override_pattern", "num_hidden_layers")
        return fields.layer_kinds(
            "layers_block_type", {k: v for k, v in _KINDS.items() if v in _NAMES}
        )
    pattern = fields.take("hybrid_override_pattern")
    fields.check(
        isinstance(pattern, str)
        and 0 < len(pattern) <= MAX_LAYERS
        and set(pattern) <= set(_PATTERN),
        f"hybrid_override_pattern must consist of {''.join(_PATTERN)}, got {pattern!r:.80}",
    )
    if fields.has("num_hidden_layers"):
        num_layers = fields.integer("num_hidden_layers")
        fields.check(
            num_layers == len(pattern),
            f"hybrid_override_pattern has {len(pattern)} letters for {num_layers} layers",
        )
    return tuple(_PATTERN[letter] for letter in pattern)


def _nemotron_experts(fields: Fields, activation: str) -> MoeConfig:
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688)
    fields.ignore("one, of the width that the config says", "n_shared_experts")
    return MoeConfig(
        num_experts=fields.integer("n_routed_experts", 8),
        num_active=fields.integer("num_experts_per_tok", 2),
        hidden_size=fields.integer("moe_intermediate_size", 7688),
        router="sigmoid",
        num_router_groups=fields.integer("n_group", 1),
        num_active_groups=fields.integer("topk_group", 1),
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        latent_size=fields.integer("moe_latent_size") if fields.has("moe_latent_size") else None,
        shared_size=shared,
        activation=activation,
        gated=False,
    )


def write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `NemotronHConfig`."""
    m, a, mlp, moe = mixer_of(config), config.attention, config.mlp, config.moe
    values = hf_values(config, "nemotron_h", "NemotronHForCausalLM") | {
        "layers_block_type": [_NAMES.get(kind, kind) for kind in config.layers],
        "mamba_num_heads": m.num_heads,
        "mamba_head_dim": m.head_dim,
        "ssm_state_size": m.state_size,
        "n_groups": m.num_groups,
        "conv_kernel": m.conv_width,
        "use_conv_bias": m.conv_bias,
        "use_bias": m.in_proj_bias,
        "time_step_limit": limits(m),
        "chunk_size": m.chunk_size,
        "mamba_hidden_act": m.activation,
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_float32,
    }
    if a is not None:
        values |= {
            "num_attention_heads": a.num_heads,
            "num_key_value_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
        }
    if mlp is not None:
        values |= {
            "intermediate_size": mlp.hidden_size,
            "mlp_bias": mlp.bias,
            "mlp_hidden_act": mlp.activation,
        }
    if moe is not None:
        values |= {
            "mlp_hidden_act": moe.activation,
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "moe_intermediate_size": moe.hidden_size,
            "moe_shared_expert_intermediate_size": moe.shared_size,
            "n_group": moe.num_router_groups,
            "topk_group": moe.num_active_groups,
            "norm_topk_prob": moe.normalise,
            "routed_scaling_factor": moe.scale,
            "moe_latent_size": moe.latent_size,
        }
    return values


# --- Zamba2.


def read_zamba2(fields: Fields, quirks: Collection[str]) -> Description:
    """`Zamba2Config`: transformer blocks that layers share, beside a Mamba-2 stack."""
    d_model = fields.integer("hidden_size", 2560)
    fields.check(
        not fields.flag("use_long_context", False),
        "use_long_context = true is not supported: transformers 4 and 5 disagree on its RoPE",
    )
    fields.alias(layers_block_type="layer_types")
    num_layers = fields.integer("num_hidden_layers", 54, most=MAX_LAYERS)
    kinds = fields.layer_kinds("layers_block_type", {k: _KINDS[k] for k in _ZAMBA_KINDS})
    fields.check(
        len(kinds) == num_layers,
        f"layers_block_type has {len(kinds)} entries for num_hidden_layers = {num_layers}",
    )
    num_uses = kinds.count("shared")
    fields.check(num_uses > 0, "no layer of layers_block_type is 'hybrid'; use mamba2")
    num_blocks = fields.integer("num_mem_blocks", 1)
    bias = fields.flag("add_bias_linear", False)
    inner = fields.integer("mamba_expand", 2) * d_model
    num_heads = fields.integer("n_mamba_heads", 8)
    fields.check(inner % num_heads == 0, f"n_mamba_heads = {num_heads} does not divide {inner}")
    mamba2 = Mamba2Config(
        num_heads=num_heads,
        head_dim=inner // num_heads,
        state_size=fields.integer("mamba_d_state", 64),
        num_groups=fields.integer("mamba_ngroups", 1),
        conv_width=fields.integer("mamba_d_conv", 4),
        conv_bias=True,
        in_proj_bias=bias,
        out_proj_bias=bias,
        dt_limit=_dt_limit(fields, fields.number("time_step_min", 1e-3), quirks),
        norm_eps=1e-5,  # hard-coded, whatever rms_norm_eps is
        chunk_size=fields.integer("chunk_size", 256),
    )
    heads = fields.integer("num_attention_heads", 32)
    head_dim = 2 * d_model // heads
    theta, scaling, table = fields.rope()
    table.finish()
    has_rope = fields.flag("use_mem_rope", False)
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        input_multiple=2,
        scale=(head_dim / 2) ** -0.5,
    )
    adapters = fields.flag("use_shared_attention_adapter", False)
    fields.check(
        not adapters or attention.num_kv_heads == heads,
        "adapters on grouped keys and values are not possible in transformers",
    )
    layers: list[str] = []
    for kind in kinds:
        layers += ["shared", "mamba2"] if kind == "shared" else ["mamba2"]
    config = ModelConfig(
        layers=tuple(layers),
        mamba2=mamba2,
        attention=_rotated(attention, head_dim, theta, scaling) if has_rope else attention,
        mlp=MlpConfig(
            fields.integer("intermediate_size", 4 * d_model),
            activation=fields.choice("hidden_act", "gelu", {"gelu": "gelu"} | _SILU),
            bias=bias,
        ),
        shared=SharedConfig(
            min(num_blocks, num_uses), fields.integer("adapter_rank", 128), adapters
        ),
        max_length=_max_length(fields) if has_rope else None,
        **_model(fields, d_model, tied=True),
    )
    fields.ignore("without RoPE there is no limit", "max_position_embeddings")
    fields.ignore(
        "derived from others",
        "attention_head_dim",
        "attention_hidden_size",
        "head_dim",
        "hybrid_layer_ids",
        "kv_channels",
        "mamba_headdim",
        "num_query_groups",
    )
    fields.ignore("never read: the convolution has a bias", "use_conv_bias")
    fields.ignore("of kernels", "use_mem_eff_path")
    fields.ignore("of training", "initializer_range", "time_step_max", "time_step_floor")
    fields.ignore("of Zamba2's first code, and in the tensors", *_ZAMBA_OLD)
    return _finish("transformers zamba2", fields, config, tables.zamba2(config))


_ZAMBA_KINDS = ("mamba", "linear_attention", "hybrid")
_ZAMBA_OLD = ("ffn_hidden_size", "lora_rank", "use_shared_mlp_lora", "use_shared_block_lora")


def write_zamba2(config: ModelConfig) -> dict[str, Any]:
    """A config.json of `Zamba2Config`."""
    m, a, shared = mixer_of(config), _attention_of(config), _present(config.shared)
    kinds = []
    for above, kind in zip((None, *config.layers), config.layers, strict=False):
        if kind != "shared":
            kinds.append("hybrid" if above == "shared" else "linear_attention")
    return (
        hf_values(config, "zamba2", "Zamba2ForCausalLM")
        | _rope_values(a)
        | {
            "num_hidden_layers": len(kinds),
            "layers_block_type": kinds,
            "num_mem_blocks": shared.num_blocks,
            "adapter_rank": shared.adapter_rank,
            "use_shared_attention_adapter": shared.attention_adapters,
            "use_mem_rope": a.rotary_dim > 0,
            "num_attention_heads": a.num_heads,
            "num_key_value_heads": a.num_kv_heads,
            "intermediate_size": _present(config.mlp).hidden_size,
            "hidden_act": _present(config.mlp).activation,
            "add_bias_linear": m.in_proj_bias,
            "n_mamba_heads": m.num_heads,
            "mamba_expand": m.inner_size // config.d_model,
            "mamba_d_state": m.state_size,
            "mamba_ngroups": m.num_groups,
            "mamba_d_conv": m.conv_width,
            "chunk_size": m.chunk_size,
            "rms_norm_eps": config.norm_eps,
            "max_position_embeddings": config.max_length or 1 << 12,
        }
    )


# --- MambaInLlama.


def read_mamba_in_llama(
    fields: Fields,
    mamba: Fields,
    tensors: Mapping[str, Tensor],
    quirks: Collection[str],
) -> Description:
    """Llama's config.json, and beside it mamba_config.json."""
    d_model = fields.integer("hidden_size")
    ssm = mamba.table("ssm_cfg")
    num_heads, state_size = ssm.integer("ngroups"), ssm.integer("d_state")
    inner, x_size = mamba.integer("d_inner"), mamba.integer("d_xb")
    mamba.check(
        inner == num_heads * state_size,
        f"d_inner = {inner} is not ssm_cfg.ngroups * ssm_cfg.d_state = {num_heads} * {state_size}",
    )
    mamba.check(x_size % state_size == 0, f"ssm_cfg.d_state does not divide d_xb = {x_size}")
    mamba.check(mamba.integer("d_model") == d_model, "d_model is not config.json's hidden_size")
    mamba2 = Mamba2Config(
        num_heads=num_heads,
        head_dim=state_size,
        state_size=state_size,
        num_groups=num_heads,
        num_x_heads=x_size // state_size,
        num_b_groups=x_size // state_size,
        repeat_before_conv=ssm.flag("repeat_kv_before_conv", False),
        conv_width=ssm.integer("d_conv", 4),
        conv_bias=ssm.flag("conv_bias", True),
        in_proj_bias=ssm.flag("bias", False),
        out_proj_bias=ssm.flag("bias", False),
        dt_limit=ssm.limits("dt_limit"),
        norm_eps=1e-5,  # hard-coded in the mixer
        chunk_size=ssm.integer("chunk_size", 256),
    )
    ssm.ignore("overridden upstream", "expand", "headdim")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    mamba.check(
        mamba.integer("n_layer") == num_layers, "n_layer is not config.json's num_hidden_layers"
    )
    with_attention = mamba.indices("attn_layers", num_layers)
    epsilon = fields.positive("rms_norm_eps", 1e-6)
    mamba.check(
        mamba.positive("rms_norm_eps", epsilon) == epsilon, "rms_norm_eps is not config.json's"
    )
    activation = fields.choice("hidden_act", "silu", _SILU)
    mamba.ignore("said by config.json", "hidden_act", "vocab_size", "tie_embeddings")
    hidden = mamba.integer("intermediate_size", fields.integer("intermediate_size"))
    attention = None
    if with_attention:
        heads = fields.integer("num_attention_heads")
        attention = AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", max(1, d_model // heads)),
            qkv_bias=fields.flag("attention_bias", False),
            out_bias=fields.flag("attention_bias", False),
        )
        theta, scaling, table = fields.rope(plain="plain_rope" in quirks)
        table.finish()
        attention = _rotated(attention, attention.head_dim, theta, scaling)
    else:
        fields.ignore("no layer has attention", *_ROPE, *_LLAMA_ATTENTION)
    kinds = ["attention" if i in with_attention else "mamba2" for i in range(num_layers)]
    config = ModelConfig(
        layers=_pairs(kinds, "mlp"),
        mamba2=mamba2,
        attention=attention,
        mlp=MlpConfig(hidden, activation=activation, bias=fields.flag("mlp_bias", False)),
        max_length=_max_length(fields) if with_attention else None,
        **_model(fields, d_model, epsilon=epsilon),
    )
    fields.ignore("without RoPE there is no limit", "max_position_embeddings")
    fields.ignore("of training", "initializer_range")
    rules = tables.llama_like(
        config,
        mlp=tables.split_mlp(_present(config.mlp)),
        mlp_name="mlp",
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
    )
    skipped = [
        Ignored(name, "computed from the config")
        for name in tensors
        if name.endswith("rotary_emb.inv_freq")
    ]
    description = _finish("MambaInLlama", fields, config, rules, skipped)
    return description._replace(notes=description.notes + ssm.finish() + mamba.finish())


_LLAMA_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias")


def write_mamba_in_llama(config: ModelConfig) -> dict[str, Any]:
    """A config.json of MambaInLlama; `mamba_in_llama_values` is the file beside it."""
    a, mlp = config.attention, _present(config.mlp)
    values = hf_values(config, "llama", "LlamaForCausalLM") | {
        "num_hidden_layers": len(config.layers) // 2,
        "num_attention_heads": mixer_of(config).num_heads,
        "rms_norm_eps": config.norm_eps,
        "intermediate_size": mlp.hidden_size,
        "hidden_act": mlp.activation,
        "mlp_bias": mlp.bias,
        "max_position_embeddings": config.max_length,
    }
    if a is not None:
        values |= {
            "num_attention_heads": a.num_heads,
            "num_key_value_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
            "attention_bias": a.qkv_bias,
            "rope_theta": a.rope_theta,
            "rope_scaling": _scaling_values(a.rope_scaling) if a.rope_scaling else None,
        }
    return values


def mamba_in_llama_values(config: ModelConfig) -> dict[str, Any]:
    """The mamba_config.json of a MambaInLlama model."""
    m = mixer_of(config)
    return {
        "d_model": config.d_model,
        "ssm_cfg": {
            "expand": 1,
            "ngroups": m.num_heads,
            "d_state": m.state_size,
            "repeat_kv_before_conv": m.repeat_before_conv,
            "d_conv": m.conv_width,
            "conv_bias": m.conv_bias,
            "bias": m.in_proj_bias,
            "dt_limit": limits(m),
            "chunk_size": m.chunk_size,
        },
        "rms_norm_eps": config.norm_eps,
        "vocab_size": None,
        "d_inner": m.inner_size,
        "d_xb": m.x_heads * m.head_dim,
        "intermediate_size": _present(config.mlp).hidden_size,
        "hidden_act": _present(config.mlp).activation,
        "n_layer": len(config.layers) // 2,
        "attn_layers": _positions(config.layers[::2], "attention"),
    }


# --- What they share.

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def _mamba2(
    fields: Fields, *, inner: int | None = None, eps_default: float = 1e-5, **more: Any
) -> tuple[Mamba2Config, int]:
    """The mixer of Bamba, Granite and Falcon-H1, and the model's width."""
    d_model = fields.integer("hidden_size", 4096)
    if inner is None:
        inner = fields.integer("mamba_expand", 2) * d_model
    num_heads = fields.integer("mamba_n_heads", 128)
    head_dim = fields.take("mamba_d_head", "auto")
    if head_dim == "auto":
        fields.check(inner % num_heads == 0, f"mamba_n_heads = {num_heads} does not divide {inner}")
        head_dim = inner // num_heads
    else:
        head_dim = fields.integer("mamba_d_head")
    fields.check(
        num_heads * head_dim == inner,
        f"mamba_n_heads * mamba_d_head = {num_heads} * {head_dim} is not {inner}",
    )
    bias = fields.flag("mamba_proj_bias", False)
    fields.ignore("of training", "initializer_range")
    return Mamba2Config(
        **dict(
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=fields.integer("mamba_d_state", 256),
            num_groups=fields.integer("mamba_n_groups", 1),
            conv_width=fields.integer("mamba_d_conv", 4),
            conv_bias=fields.flag("mamba_conv_bias", True),
            in_proj_bias=bias,
            out_proj_bias=bias,
            dt_limit=fields.limits("time_step_limit"),
            norm_eps=fields.positive("rms_norm_eps", eps_default),
            chunk_size=fields.integer("mamba_chunk_size", 256),
        )
        | more
    ), d_model


def _mamba2_values(config: ModelConfig) -> dict[str, Any]:
    m = mixer_of(config)
    return {
        "mamba_n_heads": m.num_heads,
        "mamba_d_head": m.head_dim,
        "mamba_d_state": m.state_size,
        "mamba_n_groups": m.num_groups,
        "mamba_d_conv": m.conv_width,
        "mamba_expand": max(1, m.inner_size // config.d_model),
        "mamba_conv_bias": m.conv_bias,
        "mamba_proj_bias": m.in_proj_bias,
        "mamba_chunk_size": m.chunk_size,
        "time_step_limit": limits(m),
        "rms_norm_eps": config.norm_eps,
    }


def _attention(fields: Fields, d_model: int, **more: Any) -> AttentionConfig:
    num_heads = fields.integer("num_attention_heads", 32)
    bias = fields.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", max(1, d_model // num_heads)),
        qkv_bias=bias,
        out_bias=bias,
        **more,
    )


def _attention_values(config: ModelConfig) -> dict[str, Any]:
    a = _attention_of(config)
    return {
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "attention_bias": a.qkv_bias,
    }


def _rotated(
    attention: AttentionConfig, rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> AttentionConfig:
    return dataclasses.replace(
        attention, rotary_dim=rotary_dim, rope_theta=theta, rope_scaling=scaling
    )


def _rope_values(attention: AttentionConfig, **more: Any) -> dict[str, Any]:
    scaling = attention.rope_scaling
    table = {"rope_type": "default"} if scaling is None else _scaling_values(scaling)
    return {"rope_parameters": {"rope_theta": attention.rope_theta} | table | more}


def _scaling_values(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _gated_mlp(fields: Fields, **more: Any) -> MlpConfig:
    return MlpConfig(
        fields.integer("intermediate_size", 14336),
        activation=fields.choice("hidden_act", "silu", _SILU),
        bias=fields.flag("mlp_bias", False),
        **more,
    )


def _model(
    fields: Fields,
    d_model: int,
    *,
    epsilon: float | None = None,
    eps_default: float = 1e-5,
    tied: bool = False,
    residual: bool = False,
) -> dict[str, Any]:
    """What is said of a whole model in the same words by all; `residual`: but of that."""
    vocab_size = fields.integer("vocab_size", 32000)
    return dict(
        vocab_size=vocab_size,
        d_model=d_model,
        norm_eps=fields.positive("rms_norm_eps", eps_default) if epsilon is None else epsilon,
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        eos_token=fields.token("eos_token_id", vocab_size),
    ) | ({} if residual else {"residual_float32": False})


def _max_length(fields: Fields) -> int | None:
    """The longest text; absent: no limit."""
    name = "max_position_embeddings"
    return fields.integer(name) if fields.has(name) else None


def _dt_limit(fields: Fields, floor: float, quirks: Collection[str]) -> tuple[float, float]:
    """Transformers clamps at `time_step_min` in prefill, although nothing says so."""
    low, high = fields.limits("time_step_limit")
    return (max(low, floor), high) if "hf_dt_floor" in quirks else (low, high)


def _pairs(kinds: Collection[str], then: str) -> tuple[str, ...]:
    """A mixer and then an MLP for each source layer."""
    return tuple(part for kind in kinds for part in (kind, then))


def _positions(kinds: Collection[str], wanted: str) -> list[int]:
    return [i for i, kind in enumerate(kinds) if kind == wanted]


def _inverse(value: float) -> float:
    """A number whose reciprocal is `value`, a short one if there is one."""
    short = float(f"{1 / value:.9g}")
    return short if 1 / short == value else 1 / value


def _attention_of(config: ModelConfig) -> AttentionConfig:
    if config.attention is None:
        raise ValueError(f"layers = {config.layers} have no attention")
    return config.attention


def _present(part: Any) -> Any:
    if part is None:
        raise ValueError("a kind of layer that the family always has is missing")
    return part


def _finish(
    family: str,
    fields: Fields,
    config: ModelConfig,
    rules: list,
    skipped: list[Ignored] | None = None,
) -> Description:
    fields.take("model_type", "")
    fields.ignore("of transformers, not of the model", *TRANSFORMERS, "use_mamba_kernels")
    ignored = tied_head(config, "lm_head.weight") + (skipped or [])
    return Description(family, config, rules, ignored, fields.finish())
