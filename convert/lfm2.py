"""LFM2, LFM2.5 and LFM3: transformers' `Lfm2Config`, `Lfm2MoeConfig` and `Lfm3Config`.

Gated short convolutions and attention with norms of queries and keys, each with an MLP or experts
behind it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert.description import Description, Source, required
from stree_jax.convert.fields import Fields, Table, values_of
from stree_jax.convert.rules import CONV, TRANSPOSED, Rule
from stree_jax.convert.tables import (
    GATED_BY_NUMBER,
    hf_attention,
    in_pairs,
    linear,
    split_experts,
    split_mlp,
    within,
)
from stree_jax.models import AttentionConfig, LayerConfig, MlpConfig, MoeConfig, ShortConvConfig
from stree_jax.models.config import ModelConfig

_KINDS = {"conv": "short_conv", "full_attention": "attention"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_EXPERTS: Table = dict(
    num_experts=("num_experts", 32),
    num_active=("num_experts_per_tok", 4),
    hidden_size=("moe_intermediate_size", 1792),
    normalise=("norm_topk_prob", True),
    scale=("routed_scaling_factor", 1.0),
)
_ROPE: dict[str, dict[str, Any]] = {  # LFM3's
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6}
    | {"partial_rotary_factor": 0.5},
}
_AFTER = ("post_operator_norm", "post_ffn_norm")
_NORMS = {"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm", "final_norm": "embedding_norm"}
_OF_TRAINING = (
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
    "conv_use_xavier_init",
)


def read_lfm2(source: Source) -> Description:
    """`Lfm2Config`: MLPs, whose size the config may say before an adjustment."""
    fields = source.fields
    num_layers = fields.num_layers(32)
    fields.null("layer_types")
    if fields.has("layer_types"):
        kinds = fields.layer_kinds("layer_types", _KINDS, num_layers)
        fields.ignore("layer_types says it", "full_attn_idxs")
    else:
        fields.take("full_attn_idxs")  # one of them must be there
        indices = fields.indices("full_attn_idxs", num_layers)
        kinds = tuple("attention" if i in indices else "short_conv" for i in range(num_layers))
    size = fields.integer("intermediate_size", 12288)
    size = fields.integer("block_ff_dim", size)  # which transformers prefers
    multiplier = fields.positive("block_ffn_dim_multiplier", 1.0)
    multiple = fields.integer("block_multiple_of", 256)
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = -int(multiplier * int(2 * size / 3)) // multiple * -multiple
    return _read("lfm2", fields, kinds, [MlpConfig(size)] * num_layers)


def read_lfm2_moe(source: Source) -> Description:
    """`Lfm2MoeConfig`: experts, but MLPs in the first layers."""
    fields = source.fields
    kinds = fields.layer_kinds("layer_types", _KINDS)
    fields.same("num_hidden_layers", len(kinds))
    fields.check(fields.flag("use_expert_bias", True), "use_expert_bias = false is not supported")
    experts = MoeConfig(**fields.read(_EXPERTS), router="sigmoid", norm_eps=1e-6)
    mlp = MlpConfig(fields.integer("intermediate_size", 7168))
    dense = fields.integer("num_dense_layers", 2, least=0)
    after = [mlp if i < dense else experts for i in range(len(kinds))]
    return _read("lfm2_moe", fields, kinds, after)


def read_lfm3(source: Source) -> Description:
    """`Lfm3Config`: attention with and without a window, gates of heads, norms after each part."""
    fields = source.fields
    defaults = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    fields.values = {"vocab_size": 128000, "rope_parameters": _ROPE} | defaults | fields.values
    fields.alias(norm_eps="rms_norm_eps")
    kinds = _lfm3_kinds(fields)
    d_model, norm_eps = fields.integer("hidden_size", 2048), fields.positive("norm_eps", 1e-5)
    gate = fields.flag("use_attention_gate", True)
    gates = {"output_gate": gate, "gate_per_head": gate}
    attention = hybrid.read_attention(fields, d_model, qk_norm_eps=norm_eps, **gates)
    fields.check(
        not (gate and attention.qkv_bias),
        "attention_bias = true with use_attention_gate = true is not supported: no release has it",
    )
    bias = fields.flag("conv_bias", False)
    conv = ShortConvConfig(d_model, fields.integer("conv_L_cache", 7), bias)
    mixers: dict[str, LayerConfig] = {"conv": conv}
    rope, absent = fields.table("rope_parameters"), _ROPE.keys() - {*kinds}
    for kind in _ROPE.keys() & {*kinds}:
        mixers[kind] = _turned(rope.table(kind), attention)
    if isinstance(local := mixers.get("sliding_attention"), AttentionConfig):
        window = fields.integer("sliding_window", 256)
        mixers["sliding_attention"] = replace(local, window=window)
    rope.ignore("no layer is of this kind", *absent)
    rope.finish()
    fields.ignore("no layer has a window", "sliding_window")
    mlp = MlpConfig(fields.integer("intermediate_size", 7680))
    config = ModelConfig(
        layers=tuple(layer for kind in kinds for layer in (mixers[kind], mlp)),
        sandwich_norms=fields.flag("use_sandwich_norm", True),
        **hybrid.model_fields(fields, d_model, norm_eps=norm_eps, tied=True),
    )
    rules = in_pairs(config, lambda layer: _rules(layer, "o_proj", "norm"), after=_AFTER, **_NORMS)
    return hybrid.described("transformers lfm3", fields, config, rules)


def _lfm3_kinds(fields: Fields) -> tuple[str, ...]:
    """The mixers by transformers' names."""
    num_layers = fields.num_layers(24)
    fields.null("layer_types")
    four = ("sliding_attention", "conv", "full_attention", "conv")
    default = [four[i % 4] if i else "conv" for i in range(num_layers)]
    return fields.layer_kinds("layer_types", {name: name for name in four}, num_layers, default)


def _turned(table: Fields, attention: AttentionConfig) -> AttentionConfig:
    """The attention of one kind of layer, with its RoPE."""
    types = {name: name for name in ("default", "proportional")}
    theta, pairs = table.number("rope_theta"), None
    if table.choice("rope_type", "default", types) == "proportional":
        pairs = int(table.number("partial_rotary_factor", 1.0) * attention.head_dim // 2)
    table.finish()
    return replace(attention, rotary_dim=attention.head_dim, rotary_pairs=pairs, rope_theta=theta)


def _read(
    family: str, fields: Fields, kinds: Iterable[str], after: Iterable[LayerConfig]
) -> Description:
    d_model = fields.integer("hidden_size", 2560 if family == "lfm2" else 2048)
    norm_eps = fields.positive("norm_eps", 1e-5)
    fields.values.setdefault("num_key_value_heads", 8)
    attention = hybrid.read_attention(fields, d_model, qk_norm_eps=norm_eps)
    attention = hybrid.rotated(fields, attention, 1e6)
    width, bias = fields.integer("conv_L_cache", 3), fields.flag("conv_bias", False)
    conv = ShortConvConfig(d_model, width, bias)
    again = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), d_model)  # in older files
    again |= {"num_heads": attention.num_heads, "theta": attention.rope_theta}
    again["block_norm_eps"] = norm_eps
    for name, value in again.items():
        fields.same(name, value)
    for name in ("block_use_swiglu", "use_pos_enc"):
        fields.check(fields.flag(name, True), f"{name} = false is not supported")
    fields.ignore("used in training only", *_OF_TRAINING)
    if fields.has("tie_embedding"):  # which transformers prefers, too
        fields.values["tie_word_embeddings"] = fields.flag("tie_embedding", True)
    mixers = {"short_conv": conv, "attention": attention}
    layers = [part for kind, mlp in zip(kinds, after, strict=True) for part in (mixers[kind], mlp)]
    sizes = hybrid.model_fields(fields, d_model, norm_eps=norm_eps, tied=True)
    config = ModelConfig(layers=tuple(layers), **sizes)
    rules = in_pairs(config, _rules, **_NORMS)
    return hybrid.described(f"transformers {family}", fields, config, rules)


def _rules(layer: LayerConfig, out: str = "out_proj", norm: str = "layernorm") -> list[Rule]:
    """The tensors of a layer by their names within it; `out` and `norm` are of attention."""
    match layer:
        case ShortConvConfig():
            conv = [Rule("conv.weight", "conv_weight", CONV), Rule("conv.bias", "conv_bias")]
            projections = [*linear("in_proj", "in_proj"), *linear("out_proj", "out_proj")]
            return within([*conv, *projections], "conv")
        case AttentionConfig():
            return within(hf_attention(layer, out=out, norm=norm), "self_attn")
        case MlpConfig():
            return within(split_mlp(layer, GATED_BY_NUMBER), "feed_forward")
    assert isinstance(layer, MoeConfig)
    experts = split_experts(layer.num_experts, GATED_BY_NUMBER)
    router = [Rule("gate.weight", "router", TRANSPOSED), Rule("expert_bias", "correction")]
    return within([*experts, *router], "feed_forward")


def write_lfm2(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Lfm2Config`."""
    values = _values(config, dtype, "lfm2", "Lfm2ForCausalLM")
    values["intermediate_size"] = required(config, "mlp").hidden_size
    return values | {"block_auto_adjust_ff_dim": False}


def write_lfm2_moe(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Lfm2MoeConfig`."""
    moe, mlp = required(config, "moe"), config.mlp
    return _values(config, dtype, "lfm2_moe", "Lfm2MoeForCausalLM") | {
        "intermediate_size": 7168 if mlp is None else mlp.hidden_size,
        "num_dense_layers": config.kinds.count("mlp"),
        **values_of(moe, _EXPERTS),
    }


def write_lfm3(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Lfm3Config`."""
    kinds, rope, window = [], {}, None
    for layer in config.layers[::2]:
        if isinstance(layer, AttentionConfig):
            window = layer.window or window
            kinds.append("sliding_attention" if layer.window else "full_attention")
            rope[kinds[-1]] = _rope_values(layer)
        else:
            kinds.append(_NAMES.get(layer.kind, layer.kind))
    attention = required(config, "attention")
    return _values(config, dtype, "lfm3", "Lfm3ForCausalLM") | {
        "intermediate_size": required(config, "mlp").hidden_size,
        "layer_types": kinds,
        "rope_parameters": rope,
        "sliding_window": window or 256,
        "use_attention_gate": attention.output_gate,
        "use_sandwich_norm": config.sandwich_norms,
    }


def _rope_values(attention: AttentionConfig) -> dict[str, Any]:
    """The inverse of `_turned`."""
    values = {"rope_type": "default", "rope_theta": attention.rope_theta}
    if attention.rotary_pairs is None:
        return values
    share = 2 * attention.rotary_pairs / attention.head_dim
    return values | {"rope_type": "proportional", "partial_rotary_factor": share}


def _values(config: ModelConfig, dtype: str, name: str, architecture: str) -> dict[str, Any]:
    """The fields that the families share."""
    attention, conv = (required(config, kind) for kind in ("attention", "short_conv"))
    return hybrid.usual_values(config, attention, dtype, name, architecture) | {
        "head_dim": attention.head_dim,
        "norm_eps": config.norm_eps,
        "layer_types": [_NAMES.get(kind, kind) for kind in config.kinds[::2]],
        "conv_L_cache": conv.conv_width,
        "conv_bias": conv.bias,
    }
