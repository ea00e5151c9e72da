"""Olmo-Hybrid and Lara: transformers' `OlmoHybridConfig` and `LaraMiniConfig`.

Gated delta layers with Qwen3.5's mathematics, and attention without a gate. Around Olmo's attention
the norms are those of the outputs. Lara's attention has a window and RoPE, or neither.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import qwen
from stree_jax.convert.description import Description, Source
from stree_jax.convert.rules import Rule, renamed
from stree_jax.convert.tables import hf_attention, in_pairs, split_mlp, within
from stree_jax.models import AttentionConfig, GatedDeltaConfig, LayerConfig, MlpConfig
from stree_jax.models.config import ModelConfig

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_OF_TRAINING = ("initializer_range", "linear_a_log_min", "linear_a_log_max", "linear_dt_min")
_OF_TRAINING += ("linear_dt_max", "linear_dt_init_floor")


def read_olmo_hybrid(source: Source) -> Description:
    """`OlmoHybridConfig`: MLPs, norms after attention and after its MLP."""
    fields = source.fields
    d_model, norm_eps = fields.integer("hidden_size", 3840), fields.positive("rms_norm_eps", 1e-6)
    attention = hybrid.read_attention(
        fields, d_model, qk_norm_eps=norm_eps, qk_norm_spans=True, norm_after=True
    )
    rope = fields.table("rope_parameters")
    rope.null("rope_theta")
    # transformers gives RoPE where there is no table, and none where its base is null.
    said = "rope_theta" in (fields.values.get("rope_parameters") or {})
    fields.check(said, "rope_parameters must have rope_theta: a number, or null for no RoPE")
    if rope.has("rope_theta"):
        theta, scaling, rope = fields.rope()
        attention = hybrid.with_rope(attention, attention.head_dim, theta, scaling)
    else:
        rope.ignore("there is no RoPE", "rope_type")
    rope.finish()
    mlp = MlpConfig(fields.integer("intermediate_size", 11008))
    scale = 1.0 + fields.flag("linear_allow_neg_eigval", True)
    # transformers' norm of the outputs of delta layers has an epsilon of its own.
    delta = qwen.delta_config(fields, beta_scale=scale, norm_eps=1e-5)
    keys, values = delta.num_groups * delta.state_size, delta.num_heads * delta.head_dim
    convs = [keys, keys, values]
    tensors = source.tensors
    if any(t.shape[0] != keys for name, t in tensors.items() if name.endswith("q_conv1d.weight")):
        each = -(-sum(convs) // 3)  # transformers saves equal parts
        convs = [each, each, sum(convs) - 2 * each]
    names = {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}
    by_name = [(f"{name}_conv1d", size) for name, size in zip("qkv", convs, strict=True)]

    def own(layer: LayerConfig) -> list[Rule]:
        if isinstance(layer, GatedDeltaConfig):
            table = qwen.delta(layer, _PROJECTIONS, by_name)
            return within(renamed(table, lambda name: names.get(name, name)), "linear_attn")
        if isinstance(layer, MlpConfig):
            return within(split_mlp(layer), "mlp")
        return _attention(layer)

    # transformers saves the norm of attention under the name of another norm.
    is_saved = tensors and not any("post_attention_layernorm" in name for name in tensors)
    after = "feedforward_layer_norm" if is_saved else "post_attention_layernorm"
    pairs = {"linear_attention": (delta, mlp)}
    pairs["full_attention"] = attention, replace(mlp, norm_after=True)
    norms = dict(mixer_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm")
    norms |= dict(after=(after, "post_feedforward_layernorm"))
    return _read("olmo_hybrid", source, pairs, own, **norms)


def read_lara_mini(source: Source) -> Description:
    """`LaraMiniConfig`: experts, and one that all tokens use."""
    fields = source.fields
    d_model, norm_eps = fields.integer("hidden_size", 1024), fields.positive("rms_norm_eps", 1e-6)
    attention = hybrid.read_attention(fields, d_model, qk_norm_eps=norm_eps)
    theta, scaling, table = fields.rope()
    table.finish()
    local = hybrid.with_rope(attention, attention.head_dim, theta, scaling)
    local = replace(local, window=fields.integer("sliding_window", 512))
    experts = replace(qwen.moe_config(fields, 128, 4), shared_gate=False)
    delta = qwen.delta_config(fields, norm_eps=norm_eps)
    mixers = {"linear_attention": delta, "sliding_attention": local, "full_attention": attention}

    def own(layer: LayerConfig) -> list[Rule]:
        if isinstance(layer, GatedDeltaConfig):
            table = qwen.delta(layer, ["in_proj"])
            return within(renamed(table, lambda n: n.replace("norm.", "out_norm.")), "linear_attn")
        if isinstance(layer, AttentionConfig):
            return _attention(layer)
        return within(qwen.experts(layer, merged=True), "mlp")

    pairs = {kind: (mixer, experts) for kind, mixer in mixers.items()}
    return _read("lara_mini", source, pairs, own, mlp_norm="post_attention_layernorm")


def _attention(layer: Any) -> list[Rule]:
    norms = [Rule(f"{name}_norm.weight", f"{name}_norm_scale") for name in "qk"]
    return within([*hf_attention(layer), *norms], "self_attn")


def _read(
    family: str,
    source: Source,
    pairs: Mapping[str, tuple[LayerConfig, LayerConfig]],
    own: Callable[[LayerConfig], list[Rule]],
    **norms: Any,
) -> Description:
    """The description of a model of these layers, a mixer and what follows it by kind."""
    fields = source.fields
    kinds = fields.layer_kinds("layer_types", {name: name for name in pairs})
    fields.same("num_hidden_layers", len(kinds))
    fields.choice("hidden_act", "silu", hybrid.SILU)
    fields.ignore("used in training only", *_OF_TRAINING)
    config = ModelConfig(
        layers=tuple(layer for kind in kinds for layer in pairs[kind]),
        max_length=hybrid.read_max_length(fields),
        **hybrid.model_fields(
            fields, fields.integer("hidden_size"), eps_default=1e-6, tied=family == "lara_mini"
        ),
    )
    rules = in_pairs(config, own, final_norm="norm", **norms)
    return hybrid.described(f"transformers {family}", fields, config, rules)


def write_olmo_hybrid(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`OlmoHybridConfig`."""
    attention, delta = hybrid.attention_of(config), hybrid.required(config, "gated_delta")
    values = qwen.values(config, attention, dtype, "olmo_hybrid", "OlmoHybridForCausalLM")
    if not attention.rotary_dim:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    values["linear_allow_neg_eigval"] = delta.beta_scale == 2.0
    return values | {"intermediate_size": hybrid.first(config, MlpConfig).hidden_size}


def write_lara_mini(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`LaraMiniConfig`."""
    every = [layer for layer in config.layers if isinstance(layer, AttentionConfig)]
    local = next((layer for layer in every if layer.window), None)
    attention = local or hybrid.first(config, AttentionConfig)
    values = qwen.values(config, attention, dtype, "lara_mini", "LaraMiniForCausalLM")
    values |= {"sliding_window": attention.window or 512, "norm_topk_prob": True}
    return values | qwen.moe_values(config)
