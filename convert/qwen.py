"""Gated delta families: Qwen3-Next, Qwen3.5 and 3.6, Olmo-Hybrid and Lara of transformers.

Some gated delta layers to an attention layer, each with an MLP or experts behind it. On disk the
projections of delta layers and the experts lie differently. Qwen's norms multiply by `1 + w`, and
their scales are held as such, in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert.description import Description, Source, of_head
from stree_jax.convert.fields import Fields, Table, values_of
from stree_jax.convert.rules import (
    EACH_TRANSPOSED,
    PLUS_ONE,
    TRANSPOSED,
    Rule,
    conv_gathered,
    gathered,
    renamed,
    sections,
)
from stree_jax.convert.tables import (
    hf_attention,
    in_pairs,
    linear,
    split_experts,
    split_mlp,
    within,
)
from stree_jax.heads import FOLDER, part_of
from stree_jax.models import AttentionConfig, GatedDeltaConfig, LayerConfig, MlpConfig, MoeConfig
from stree_jax.models.config import ModelConfig

_KINDS = {"linear_attention": "gated_delta", "full_attention": "attention"}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_DELTA: Table = dict(
    num_heads=("linear_num_value_heads", 32),
    head_dim=("linear_value_head_dim", 128),
    num_groups=("linear_num_key_heads", 16),
    state_size=("linear_key_head_dim", 128),
    conv_width=("linear_conv_kernel_dim", 4),
)
_EXPERTS: Table = dict(
    num_experts=("num_experts",),
    num_active=("num_experts_per_tok",),
    hidden_size=("moe_intermediate_size", 512),
    shared_size=("shared_expert_intermediate_size", 512),
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_OWN = {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}  # names
_OF_TRAINING = (
    *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
    "linear_dt_init_floor",
)


def read_qwen3_next(source: Source) -> Description:
    """`Qwen3NextConfig`: experts, and projections interleaved by key head."""
    fields = source.fields
    kinds = _kinds(fields, 48)
    mlp = MlpConfig(fields.integer("intermediate_size", 5632))
    experts = _moe_config(fields, 512, 10)
    dense = {*fields.indices("mlp_only_layers", len(kinds))}
    step = fields.integer("decoder_sparse_step", 1)
    after = [mlp if i in dense or (i + 1) % step else experts for i in range(len(kinds))]
    return _read("qwen3_next", source, kinds, after, d_model=2048)


def read_qwen3_5(source: Source) -> Description:
    """`Qwen3_5TextConfig`: MLPs."""
    kinds = _kinds(source.fields, 32)
    mlp = MlpConfig(source.fields.integer("intermediate_size", 12288))
    source.fields.ignore("all layers have an MLP", "mlp_only_layers")
    return _read("qwen3_5", source, kinds, [mlp] * len(kinds), d_model=4096)


def read_qwen3_5_moe(source: Source) -> Description:
    """`Qwen3_5MoeTextConfig`: experts."""
    fields = source.fields
    kinds = _kinds(fields, 40)
    experts = _moe_config(fields, 256, 8)
    dense = fields.indices("mlp_only_layers", len(kinds))
    fields.check(not dense, f"mlp_only_layers = {dense!s:.80} with experts in all layers")
    fields.ignore("no layer has an MLP", "intermediate_size")
    return _read("qwen3_5_moe", source, kinds, [experts] * len(kinds), d_model=2048)


def read_olmo_hybrid(source: Source) -> Description:
    """`OlmoHybridConfig`: MLPs, norms after attention and after its MLP."""
    fields = source.fields
    d_model, norm_eps = fields.integer("hidden_size", 3840), fields.positive("rms_norm_eps", 1e-6)
    attention = hybrid.read_attention(
        fields, d_model, qk_norm_eps=norm_eps, qk_norm_spans=True, norm_after=True
    )
    rope = fields.values.get("rope_parameters")
    fields.check(
        isinstance(rope, Mapping) and "rope_theta" in rope,
        "rope_parameters must have rope_theta: a number, or null for no RoPE",
    )
    if rope["rope_theta"] is None:
        fields.ignore("there is no RoPE", "rope_parameters")
    else:
        attention = hybrid.rotated(fields, attention)
    mlp = MlpConfig(fields.integer("intermediate_size", 11008))
    scale = 1.0 + fields.flag("linear_allow_neg_eigval", True)
    # transformers' norm of the outputs of delta layers has an epsilon of its own.
    linear = GatedDeltaConfig(**fields.read(_DELTA), beta_scale=scale, norm_eps=1e-5)
    keys = linear.num_groups * linear.state_size
    convs = [keys, keys, linear.num_heads * linear.head_dim]
    tensors = source.tensors
    if any(t.shape[0] != keys for name, t in tensors.items() if name.endswith("q_conv1d.weight")):
        each = -(-sum(convs) // 3)  # transformers saves equal parts
        convs = [each, each, sum(convs) - 2 * each]
    by_name = {f"{name}_conv1d": size for name, size in zip("qkv", convs, strict=True)}
    own = renamed(_delta(linear, _PROJECTIONS, by_name), lambda name: _OWN.get(name, name))
    # transformers saves the norm of attention under the name of another norm.
    is_saved = tensors and not any("post_attention_layernorm" in name for name in tensors)
    after = "feedforward_layer_norm" if is_saved else "post_attention_layernorm"
    pairs = {"linear_attention": (linear, mlp)}
    pairs["full_attention"] = attention, replace(mlp, norm_after=True)
    norms: dict[str, Any] = {"after": (after, "post_feedforward_layernorm")}
    norms |= {"mixer_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
    return _read_pairs("olmo_hybrid", fields, d_model, pairs, own, **norms)


def read_lara_mini(source: Source) -> Description:
    """`LaraMiniConfig`: experts, and one that all tokens use."""
    fields = source.fields
    d_model, norm_eps = fields.integer("hidden_size", 1024), fields.positive("rms_norm_eps", 1e-6)
    attention = hybrid.read_attention(fields, d_model, qk_norm_eps=norm_eps)
    local = replace(hybrid.rotated(fields, attention), window=fields.integer("sliding_window", 512))
    experts = replace(_moe_config(fields, 128, 4), shared_gate=False)
    linear = GatedDeltaConfig(**fields.read(_DELTA), norm_eps=norm_eps)
    mixers = {"linear_attention": linear, "sliding_attention": local, "full_attention": attention}
    own = renamed(_delta(linear, ["in_proj"]), lambda name: name.replace("norm.", "out_norm."))
    pairs = {kind: (mixer, experts) for kind, mixer in mixers.items()}
    norm = "post_attention_layernorm"
    return _read_pairs("lara_mini", fields, d_model, pairs, own, mlp_norm=norm)


def _read_pairs(
    family: str,
    fields: Fields,
    d_model: int,
    pairs: Mapping[str, tuple[LayerConfig, LayerConfig]],
    delta: list[Rule],
    **norms: Any,
) -> Description:
    """The description of a model of these layers, a mixer and what follows it by kind."""
    kinds = fields.layer_kinds("layer_types", {name: name for name in pairs})
    fields.same("num_hidden_layers", len(kinds))
    fields.choice("hidden_act", "silu", hybrid.SILU)
    fields.ignore("used in training only", *_OF_TRAINING)

    def own(layer: LayerConfig) -> list[Rule]:
        if isinstance(layer, GatedDeltaConfig):
            return within(delta, "linear_attn")
        if isinstance(layer, AttentionConfig):
            return within(hf_attention(layer, norm="norm"), "self_attn")
        return layer_rules(layer, by_group=False, merged=True)

    sizes = hybrid.model_fields(fields, d_model, eps_default=1e-6, tied=family == "lara_mini")
    layers = tuple(layer for kind in kinds for layer in pairs[kind])
    config = ModelConfig(layers=layers, **sizes)
    rules = in_pairs(config, own, final_norm="norm", **norms)
    return hybrid.described(f"transformers {family}", fields, config, rules)


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The kinds of the mixers."""
    fields.null("layer_types", "mlp_only_layers")
    num_layers = fields.num_layers(num_layers)
    every = fields.integer("full_attention_interval", 4)
    linear, full = _KINDS
    default = [linear if (i + 1) % every else full for i in range(num_layers)]
    return fields.layer_kinds("layer_types", _KINDS, num_layers, default)


def _moe_config(fields: Fields, count: int, active: int) -> MoeConfig:
    """Experts, and one that all tokens use."""
    fields.check(
        fields.flag("norm_topk_prob", True),
        "norm_topk_prob = false is not supported: no release has it",
    )
    sizes = dict(num_experts=("num_experts", count), num_active=("num_experts_per_tok", active))
    return MoeConfig(**fields.read({**_EXPERTS, **sizes}), shared_gate=True)


def _read(
    family: str,
    source: Source,
    kinds: Sequence[str],
    feed_forward: Sequence[LayerConfig],
    d_model: int,
) -> Description:
    """The description of a text model, and of the head beside it."""
    fields, tensors = source.fields, source.tensors
    d_model = fields.integer("hidden_size", d_model)
    norm_eps = fields.positive("rms_norm_eps", 1e-6)
    attention = _attention(fields, norm_eps, kv_heads=4 if family == "qwen3_5" else 2)
    delta = GatedDeltaConfig(**fields.read(_DELTA), norm_eps=norm_eps)
    fields.choice("hidden_act", "silu", hybrid.SILU)
    for name in ("layer_scale", "use_sliding_window"):
        fields.check(not fields.flag(name, False), f"{name} = true is not supported")
    fields.ignore("states are always float32", "mamba_ssm_dtype")
    mixers: list[LayerConfig] = [delta if kind == "gated_delta" else attention for kind in kinds]
    config = ModelConfig(
        layers=tuple(layer for pair in zip(mixers, feed_forward, strict=True) for layer in pair),
        norm_float32=True,
        **hybrid.model_fields(fields, d_model, norm_eps=norm_eps),
    )
    # Released merged by Qwen3.5, and saved one by one by transformers, whatever they were.
    merged = any(
        name.startswith("model.") and name.endswith("mlp.experts.gate_up_proj") for name in tensors
    )
    if not merged:
        hybrid.check_experts(fields, config, tensors)
    by_group = family == "qwen3_next"
    rules = in_pairs(
        config,
        lambda layer: layer_rules(layer, by_group=by_group, merged=merged),
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
        norm=PLUS_ONE,
    )
    heads = part_of(FOLDER, "qwen")
    head = heads.read(fields, tensors, config, merged=merged)
    skipped = of_head(name for name in tensors if name.startswith(heads.PREFIX))
    family = f"transformers {family}"
    return hybrid.described(family, fields, config, rules, skipped)._replace(mtp=head)


def _attention(fields: Fields, norm_eps: float, *, kv_heads: int) -> AttentionConfig:
    fields.check(fields.flag("attn_output_gate", True), "attn_output_gate = false is not supported")
    fields.choice("output_gate_type", "swish", {"swish": "sigmoid"})  # of a sigmoid all the same
    bias = fields.flag("attention_bias", False)
    head_dim = fields.integer("head_dim", 256)
    theta, scaling, table = fields.rope()
    fields.alias(table, partial_rotary_factor="partial_rotary_factor")
    share = fields.number("partial_rotary_factor", 0.25)
    table.ignore("positions of text alone", "mrope_section", "mrope_interleaved")
    table.finish()
    return AttentionConfig(
        num_heads=fields.integer("num_attention_heads", 16),
        num_kv_heads=fields.integer("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm_eps=norm_eps,
        output_gate=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def layer_rules(layer: LayerConfig, *, by_group: bool, merged: bool) -> list[Rule]:
    """The tensors of a mixer, or of what follows it, by their names within the layer.

    Args:
        layer: its config.
        by_group: whether a delta layer's projections are interleaved by key head (Qwen3-Next).
        merged: whether all experts are in one tensor.

    Raises:
        ValueError: these families have no such layer.
    """
    match layer:
        case GatedDeltaConfig():
            parts = ("qkvz", "ba") if by_group else ("qkv", "z", "b", "a")
            return within(_delta(layer, [f"in_proj_{part}" for part in parts]), "linear_attn")
        case AttentionConfig():
            return within(_gated_attention(layer), "self_attn")
        case MlpConfig():
            return within(split_mlp(layer), "mlp")
        case MoeConfig():
            return within(_experts(layer, merged=merged), "mlp")
    raise ValueError(f"Qwen3.5 has no layers {layer.kind!r}")


def _delta(
    layer: GatedDeltaConfig, names: Sequence[str], convs: Mapping[str, int] | None = None
) -> list[Rule]:
    """A delta layer, whose columns are b, z, v, k, q, a here.

    `names` are its input projections; q, k, v, z, b, a stand in this order in one, in four with q,
    k, v in the first, or alone; in two by key head. `convs` are its convolutions and their sizes.
    """
    heads, groups = layer.num_heads, layer.num_groups
    keys, values = groups * layer.state_size, heads * layer.head_dim
    own = (keys, keys, values, values, heads, heads)
    in_two = (2 * keys + 2 * values, 2 * heads)
    of = {1: (sum(own),), 2: in_two, 4: (sum(own[:3]), *own[3:]), 6: own}
    sizes: Sequence[int] = of[len(names)]
    convs = convs or {"conv1d": sum(own[:3])}

    def by_group() -> np.ndarray:
        of_group = np.arange(sizes[0]).reshape(groups, -1)
        in_group = (layer.state_size, layer.state_size, values // groups)
        q, k, v, z = np.split(of_group, np.cumsum(in_group), axis=1)
        b, a = np.split(sizes[0] + np.arange(sizes[1]).reshape(groups, -1), 2, axis=1)
        return np.concatenate([part.reshape(-1) for part in (b, z, v, k, q, a)])

    columns = by_group if len(names) == 2 else sections(own, (4, 3, 2, 1, 0, 5))
    convolved = conv_gathered([*convs.values()], sections(own[:3], (2, 1, 0)))
    return [
        Rule(tuple(f"{name}.weight" for name in names), "in_proj.kernel", gathered(sizes, columns)),
        Rule(tuple(f"{name}.weight" for name in convs), "conv_weight", convolved),
        Rule("A_log", "A_log"),
        Rule("dt_bias", "dt_bias"),
        Rule("norm.weight", "norm_scale"),
        Rule("out_proj.weight", "out_proj.kernel", TRANSPOSED),
    ]


def _gated_attention(layer: AttentionConfig) -> list[Rule]:
    """Attention with a gate: q_proj has each head's queries and gates side by side."""
    queries, keys, values = layer.projected_sizes
    sizes = (2 * queries, keys, values)

    def columns() -> np.ndarray:
        by_head = np.arange(2 * queries).reshape(layer.num_heads, 2, -1)
        order = [by_head[:, 1], by_head[:, 0], 2 * queries + np.arange(keys + values)]
        return np.concatenate([part.reshape(-1) for part in order])

    names = ("q_proj", "k_proj", "v_proj")
    projections = linear(names, "in_proj", gathered(sizes, columns))
    norms = [Rule(f"{name}_norm.weight", f"{name}_norm_scale", PLUS_ONE) for name in "qk"]
    return [*projections, *norms, *linear("o_proj", "out_proj")]


def _experts(layer: MoeConfig, *, merged: bool) -> list[Rule]:
    """Experts, and one that all tokens use."""
    if merged:
        own = [
            Rule("experts.gate_up_proj", "experts_in", EACH_TRANSPOSED),
            Rule("experts.down_proj", "experts_out", EACH_TRANSPOSED),
        ]
    else:
        own = split_experts(layer.num_experts)
    shared = MlpConfig(layer.shared_size)
    return [
        *own,
        Rule("gate.weight", "router", TRANSPOSED),
        Rule("shared_expert_gate.weight", "shared_gate", TRANSPOSED),
        *within(split_mlp(shared), "shared_expert", "shared"),
    ]


def write_qwen3_next(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Qwen3NextConfig`."""
    after = config.layers[1::2]
    dense = [i for i, layer in enumerate(after) if isinstance(layer, MlpConfig)]
    values = _values(config, dtype, "qwen3_next", "Qwen3NextForCausalLM")
    values |= _expert_values(config) | {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    values["norm_topk_prob"] = True
    return values | (_mlp_values(config) if dense else {"intermediate_size": 5632})


def write_qwen3_5(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Qwen3_5TextConfig`."""
    return _values(config, dtype, "qwen3_5_text", "Qwen3_5ForCausalLM") | _mlp_values(config)


def write_qwen3_5_moe(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Qwen3_5MoeTextConfig`."""
    name, architecture = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"
    return _values(config, dtype, name, architecture) | _expert_values(config)


def write_olmo_hybrid(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`OlmoHybridConfig`."""
    attention, delta = hybrid.required(config, "attention"), hybrid.required(config, "gated_delta")
    fields = _common(config, attention, dtype, "olmo_hybrid", "OlmoHybridForCausalLM")
    if not attention.rotary_dim:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    fields["linear_allow_neg_eigval"] = delta.beta_scale == 2.0
    return fields | _mlp_values(config)


def write_lara_mini(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`LaraMiniConfig`."""
    every = [layer for layer in config.layers if isinstance(layer, AttentionConfig)]
    local = next((layer for layer in every if layer.window), None)
    attention = local or hybrid.required(config, "attention")
    fields = _common(config, attention, dtype, "lara_mini", "LaraMiniForCausalLM")
    fields |= {"sliding_window": attention.window or 512, "norm_topk_prob": True}
    return fields | _expert_values(config)


def _mlp_values(config: ModelConfig) -> dict[str, Any]:
    return {"intermediate_size": hybrid.required(config, "mlp").hidden_size}


def _expert_values(config: ModelConfig) -> dict[str, Any]:
    return values_of(hybrid.required(config, "moe"), _EXPERTS)


def _values(config: ModelConfig, dtype: str, name: str, architecture: str) -> dict[str, Any]:
    """The fields that the families of Qwen share."""
    attention = hybrid.required(config, "attention")
    share = attention.rotary_dim / attention.head_dim
    rope = hybrid.rope_values(attention, partial_rotary_factor=share)
    return _common(config, attention, dtype, name, architecture) | rope


def _common(
    config: ModelConfig, attention: AttentionConfig, dtype: str, name: str, architecture: str
) -> dict[str, Any]:
    """The fields that all families with delta layers share, with this one of their attentions."""
    delta = hybrid.required(config, "gated_delta")
    kinds = [
        "sliding_attention"
        if getattr(layer, "window", None)
        else _NAMES.get(layer.kind, layer.kind)
        for layer in config.layers[::2]
    ]
    return hybrid.usual_values(config, attention, dtype, name, architecture) | {
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "layer_types": kinds,
        **values_of(delta, _DELTA),
    }
