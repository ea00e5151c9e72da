"""Kimi-Linear and Ling 3: `KimiLinearConfig` and `BailingHybridConfig` of transformers.

Layers of Kimi Delta Attention (KDA) to one of latent attention, MLPs in the first layers and
experts behind the others. A published file and one that transformers has saved differ in fields and
names, and may have some of both: all are read, and the published ones are written.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stree_jax.checkpoint.arrays import Tensor
from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import rules as transforms
from stree_jax.convert.description import (
    Description,
    Source,
    hf_values,
    of_head,
    required,
)
from stree_jax.convert.fields import Fields, Table, values_of
from stree_jax.convert.rules import Rule
from stree_jax.convert.tables import (
    GATED_BY_NUMBER,
    in_pairs,
    linear,
    split_experts,
    split_mlp,
    within,
)
from stree_jax.heads import FOLDER, part_of
from stree_jax.models import (
    GatedDeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    MoeConfig,
)
from stree_jax.models.config import ModelConfig

_KINDS = {"linear_attention": "gated_delta", "full_attention": "latent_attention"}
_AFTER = {"dense": "mlp", "sparse": "moe"}
# Fields by the names that transformers saves, and what published files call them.
_NAMES = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_shared_experts": "n_shared_experts",
    "max_position_embeddings": "model_max_length",
    "num_nextn_predict_layers": "num_mtp_layers",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_LATENT: Table = dict(
    num_heads=("num_attention_heads",),
    latent_size=("kv_lora_rank",),
    head_dim=("qk_nope_head_dim",),
    value_dim=("v_head_dim",),
    rotary_dim=("qk_rope_head_dim",),
)
_EXPERTS: Table = dict(
    num_experts=("num_experts",),
    num_active=("num_experts_per_token",),
    num_router_groups=("num_expert_group", 1),
    num_active_groups=("topk_group", 1),
    hidden_size=("moe_intermediate_size",),
    normalise=("moe_renormalize", True),
)
_LIMITS = {"expert_swiglu_limit_list": "limit", "share_expert_swiglu_limit_list": "shared_limit"}
# Fields with one supported value.
_FALSE = (
    *("attention_bias", "mtp_use_kda", "pregate_inference", "scale_router_input", "use_bias"),
    *("tie_word_embeddings", "up_proj_norm", "use_nGPT", "use_qkv_bias", "value_norm"),
)
_TRUE = ("moe_router_enable_expert_bias", "no_kda_lora", "rope_interleave", "use_grouped_topk")
_ONLY: dict[str, Any] = dict.fromkeys(_FALSE, False) | dict.fromkeys(_TRUE, True)
_ONLY |= dict.fromkeys(("moe_router_activation_func", "score_function"), "sigmoid")
_ONLY |= dict.fromkeys(("group_norm_size", "moe_layer_freq"), 1)
_ONLY |= {"gated_attention_proj_granularity_type": "head_wise", "hidden_act": "silu"}
_ONLY |= {"linear_attention": "kda"}
_UNUSED = (
    *("aux_loss_alpha", "head_dim", "layer_group_size", "qk_head_dim"),
    *("embedding_dropout", "max_window_layers", "output_dropout", "rotary_dim", "use_qk_norm"),
    *("mtp_loss_scaling_factor", "num_key_value_heads", "router_dtype", "seq_aux"),
)
# Fields of Kimi K3's text model, which has Kimi-Linear's `model_type`.
_K3 = {"attn_res_block_size", "latent_moe_use_norm", "mla_use_output_gate"}
_K3 |= {"routed_expert_hidden_size", "gate_lower_bound", "use_full_rank_gate"}
# Fields of KDA in Ling's files, and Ling 3's architectures.
_OF_KDA = {"kda_safe_gate", "kda_lower_bound", "no_kda_lora", "short_conv_kernel_size"}
_LING_3 = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
# Around the layer of Ling's head, see `layer_rules` of heads.
_OUTSIDE = ("enorm", "hnorm", "final_layernorm", "eh_proj")
# Parts of names in Kimi's files, and in Ling's.
_TO_LING = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "block_sparse_moe": "mlp",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    "e_score_correction_bias": "expert_bias",
}


def read_kimi_linear(source: Source) -> Description:
    """`KimiLinearConfig`: no positions; the published lists of layers count from 1."""
    fields = source.fields
    fields.null("linear_attn_config", "layer_types")
    table = fields.table("linear_attn_config")
    of_k3 = sorted(_K3 & {*fields.values, *table.values})
    fields.check(not of_k3, f"{of_k3} are of Kimi K3's text model, which is not supported")
    names = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    fields.alias(table, **names, linear_conv_kernel_dim="short_conv_kernel_size")
    lists = zip(_KINDS, ("kda_layers", "full_attn_layers"), strict=True)
    count = fields.num_layers()
    kind_of = {i: kind for kind, name in lists for i in table.indices(name, count + 1)}
    table.finish()
    if kind_of:
        kinds = [kind_of.get(i + 1) for i in range(len(kind_of))]
        fields.check(
            None not in kinds and fields.values.setdefault("layer_types", kinds) == kinds,
            "linear_attn_config does not name each layer once, from 1 on, and as layer_types does",
        )
    fields.ignore("nothing is rotated", *hybrid.ROPE)
    _only(fields, {"mla_use_nope": True, "num_nextn_predict_layers": 0})
    return _read("kimi_linear", source, {}, {})


def read_bailing_hybrid(source: Source) -> Description:
    """`BailingHybridConfig`: Ling 3; interleaved RoPE, gates of heads and a bounded decay."""
    fields = source.fields
    architectures = str(fields.values.get("architectures") or _LING_3)
    marks = sorted(_OF_KDA & {*fields.values})
    fields.check(
        bool(marks) and any(name in architectures for name in _LING_3),
        f"architectures = {architectures:.80} with fields {marks} of KDA: Ling 3 has both, and"
        " Ling 2.5 and 2.6 have lightning attention: not supported",
    )
    fields.null("layer_types")
    if not fields.has("layer_types"):
        count, group = (fields.integer(name) for name in ("num_hidden_layers", "layer_group_size"))
        fields.check(
            count % group == 0,
            f"layer_group_size = {group} does not divide num_hidden_layers = {count}, and programs"
            " differ in the last layers: give layer_types",
        )
        linear, full = _KINDS
        fields.values["layer_types"] = ([linear] * (group - 1) + [full]) * (count // group)
    if not fields.has("linear_head_dim"):  # as published; transformers saves another head_dim
        fields.alias(linear_head_dim="head_dim")
    fields.values.setdefault("linear_num_heads", fields.integer("num_attention_heads"))
    theta, scaling, table = fields.rope(6e6)
    fields.check(scaling is None, "a scaling of RoPE is not supported")
    for part in (fields, table):
        part.ignore("qk_rope_head_dim says it", "partial_rotary_factor")
    table.finish()
    _only(fields, {"use_mla_nope": False})
    bound, is_safe = fields.number("kda_lower_bound", -5.0), fields.flag("kda_safe_gate", True)
    of_latent = {"rope_theta": theta, "output_gate": True}
    of_kda = {"lower_bound": bound if is_safe else None}
    return _read("bailing_hybrid", source, of_latent, of_kda)


def _only(fields: Fields, values: Mapping[str, Any]) -> None:
    """Refuses other values of these fields than the one that is supported."""
    fields.null(*values)
    for name, value in values.items():
        said = fields.take(name, value)
        fields.check(said == value, f"{name} = {said!r:.80} is not supported, only {value!r}")


def _read(
    family: str, source: Source, of_latent: Mapping[str, Any], of_kda: Mapping[str, Any]
) -> Description:
    """The description of a model of these layers, given what the family alone has."""
    fields, tensors, is_kimi = source.fields, source.tensors, family == "kimi_linear"
    fields.null("q_lora_rank", "mlp_layer_types", *_NAMES.values(), *_LIMITS)
    fields.null("num_expert_group", "topk_group", "linear_conv_kernel_dim")
    fields.alias(**_NAMES)
    _only(fields, _ONLY)
    count = fields.num_layers()
    kinds = [*fields.layer_kinds("layer_types", _KINDS, count), "latent_attention"]

    norm_eps = fields.positive("rms_norm_eps", 1e-5 if is_kimi else 1e-6)
    heads, size = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
    query_rank = fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None
    width = fields.integer("moe_intermediate_size")
    fields.same("moe_shared_expert_intermediate_size", width)
    parts: dict[str, LayerConfig] = {
        "gated_delta": GatedDeltaConfig(
            *(heads, size, heads, size, fields.integer("linear_conv_kernel_dim", 4)),
            norm_eps=norm_eps,
            chunk_size=16,
            by_channel=True,
            gate_rank=size if is_kimi else None,
            **of_kda,
        ),
        "latent_attention": LatentAttentionConfig(
            **fields.read(_LATENT), query_rank=query_rank, **of_latent
        ),
        "mlp": MlpConfig(fields.integer("intermediate_size")),
        "moe": MoeConfig(
            **fields.read(_EXPERTS),
            router="sigmoid",
            scale=fields.number("routed_scaling_factor"),
            shared_size=width * fields.integer("num_shared_experts", 1, least=0),
        ),
    }
    dense = ["dense"] * min(count, fields.integer("first_k_dense_replace", 1, least=0))
    default = dense + ["sparse"] * (count - len(dense))
    limits = {field: _limits(fields, name, count) for name, field in _LIMITS.items()}
    layers: list[LayerConfig] = []
    kinds_after = fields.layer_kinds("mlp_layer_types", _AFTER, count, default)
    for i, after in enumerate([*kinds_after, "moe"]):  # the last is a head's
        of_layer: Any = {field: values[i] for field, values in limits.items() if values[i]}
        fields.check(after == "moe" or not of_layer, f"layer {i} has {of_layer} and no experts")
        layers += [parts[kinds[i]], replace(parts[after], **of_layer)]
    *layers, attention, experts = layers
    fields.ignore("of training, or said by other fields", *_UNUSED)
    config = ModelConfig(
        layers=tuple(layers),
        **hybrid.model_fields(fields, fields.integer("hidden_size"), norm_eps=norm_eps),
    )

    hybrid.check_experts(fields, config, tensors)

    def named(name: str) -> str:
        """A tensor's name in these files."""
        other_name = name.replace(".mlp.", ".block_sparse_moe.")
        if not is_kimi:
            for kimis, lings in _TO_LING.items():
                name = name.replace(kimis, lings)
            other_name = name.replace(".o_proj", ".dense")
        # transformers saves Kimi's MLPs as experts, and Ling's KDA with the names of its attention.
        return other_name if other_name in tensors and name not in tensors else name

    norms = dict(mlp_norm="post_attention_layernorm", final_norm="norm")
    rules = in_pairs(config, functools.partial(_rules, tensors), **norms)
    rules = transforms.renamed(rules, named)
    heads, number = part_of(FOLDER, "conversion"), "num_nextn_predict_layers"
    head_layer = f"model.layers.{count}"
    head_tensors = {name: x for name, x in tensors.items() if name.startswith(f"{head_layer}.")}

    def head_and_rules() -> tuple[Any, list[Rule]]:
        head = heads.MtpConfig(config.d_model, attention, experts, norm_eps)
        outside = [f"{head_layer}.{name}" for name in _OUTSIDE]
        table = heads.layer_rules(head, head_layer, outside, functools.partial(_rules, tensors))
        return head, transforms.renamed(table, named)

    of_fields = number, fields.integer(number, 0, least=0)
    mtp = heads.described(fields, tensors, head_tensors, *of_fields, head_and_rules)
    skipped = of_head(head_tensors)
    described = hybrid.described(f"transformers {family}", fields, config, rules, skipped)
    return described._replace(mtp=mtp)


def _limits(fields: Fields, name: str, count: int) -> Sequence[float | None]:
    """Limits by layer, the head's last; 0, null and the end of the list: there is none."""
    values = fields.take(name, [None] * count)
    fields.check(
        isinstance(values, list)
        and len(values) >= count
        and {*map(type, values)} <= {int, float, type(None)},
        f"{name} must have a number or null for each layer, got {values!r:.80}",
    )
    return [float(value) if value else None for value in [*values, None]]


def _rules(tensors: Mapping[str, Tensor], layer: LayerConfig) -> list[Rule]:
    """The tensors of a layer by their names within it, in Kimi's files."""
    match layer:
        case GatedDeltaConfig():
            return within(_kda(layer, tensors), "self_attn")
        case LatentAttentionConfig():
            return within(_latent(layer), "self_attn")
        case MlpConfig():
            return within(split_mlp(layer), "mlp")
    assert isinstance(layer, MoeConfig)
    table = [
        *split_experts(layer.num_experts, GATED_BY_NUMBER),
        Rule("gate.weight", "router", transforms.TRANSPOSED),
        Rule("gate.e_score_correction_bias", "correction"),
        *within(split_mlp(layer.shared_mlp), "shared_experts", "shared"),
    ]
    return within(table, "block_sparse_moe")


def _kda(layer: GatedDeltaConfig, tensors: Mapping[str, Tensor]) -> list[Rule]:
    """KDA. Engines differ in the axes of `A_log`."""
    heads, size, rank = layer.num_heads, layer.decay_size, layer.gate_rank
    gates = ("f_a_proj", "g_a_proj") if rank else ("f_proj", "g_proj")
    sizes = (rank or size, rank or size, size, size, size, heads)
    axes = {len(x.shape) for name, x in tensors.items() if name.endswith("A_log")}
    rates = (1, 1, heads, 1) if axes <= {4} and (axes or rank) else (heads,)
    convolved = transforms.conv_gathered([size] * 3)
    names = (*gates, "v_proj", "k_proj", "q_proj", "b_proj")
    return [
        *linear(names, "in_proj", transforms.gathered(sizes)),
        *linear("f_b_proj", "a_up"),
        *linear("g_b_proj", "z_up"),
        Rule(tuple(f"{name}_conv1d.weight" for name in "vkq"), "conv_weight", convolved),
        Rule("A_log", "A_log", transforms.reshaped(rates)),
        Rule("dt_bias", "dt_bias"),
        Rule("o_norm.weight", "norm_scale"),
        *linear("o_proj", "out_proj"),
    ]


def _latent(layer: LatentAttentionConfig) -> list[Rule]:
    """Latent attention. Pairs of rotated channels are neighbours in files, and halves here."""
    sizes, narrow = layer.column_sizes, layer.query_rank

    def turned(rows: np.ndarray) -> np.ndarray:
        """Rows `[..., channels]`, whose last ones are rotated, in the order that they have here."""
        if layer.rope_theta is None:
            return rows
        kept, last = np.split(rows, [-layer.rotary_dim], axis=-1)
        return np.concatenate([kept, last[..., ::2], last[..., 1::2]], axis=-1)

    def of_queries() -> np.ndarray:
        return turned(np.arange(layer.query_size).reshape(layer.num_heads, -1)).ravel()

    def columns() -> np.ndarray:
        gates, queries, entries = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        return np.concatenate(
            [gates, queries if narrow else queries[of_queries()], turned(entries)]
        )

    names = ["g_proj", "q_a_proj" if narrow else "q_proj", "kv_a_proj_with_mqa"]
    first = 0 if layer.output_gate else 1
    sources = tuple(f"{name}.weight" for name in names[first:])
    in_heads = transforms.gathered([layer.query_size], of_queries)
    key, value = layer.head_dim, layer.value_dim
    return [
        Rule(sources, "in_proj.kernel", transforms.gathered(sizes[first:], columns)),
        Rule("q_a_layernorm.weight", "query_norm_scale"),
        Rule("q_b_proj.weight", "query_up.kernel", in_heads),
        Rule("kv_a_layernorm.weight", "latent_norm_scale"),
        Rule("kv_b_proj.weight", "key_up", transforms.of_heads(0, key, value, transposed=False)),
        Rule("kv_b_proj.weight", "value_up", transforms.of_heads(key, value, 0, transposed=True)),
        *linear("dense" if layer.output_gate else "o_proj", "out_proj"),
    ]


def write_kimi_linear(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`KimiLinearConfig`, as it is published."""
    kda, kinds = required(config, "gated_delta"), config.kinds[::2]
    full, linear = (
        [i + 1 for i in hybrid.positions_of(kinds, kind)]
        for kind in ("latent_attention", "gated_delta")
    )
    sizes = {"num_heads": kda.num_heads, "head_dim": kda.head_dim}
    sizes |= {"short_conv_kernel_size": kda.conv_width}
    return _values(config, dtype, "kimi_linear", "KimiLinearForCausalLM") | {
        "model_max_length": config.max_length,
        "linear_attn_config": {"full_attn_layers": full, "kda_layers": linear} | sizes,
    }


def write_bailing_hybrid(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`BailingHybridConfig`, as it is published."""
    latent, kda = required(config, "latent_attention"), required(config, "gated_delta")
    values = _values(config, dtype, "bailing_hybrid", "BailingMoeV3ForCausalLM")
    values |= hybrid.max_length_values(config)
    for name in ("num_experts_per_token", "num_expert_group", "moe_renormalize"):
        values[_NAMES[name]] = values.pop(name)
    for name, field in _LIMITS.items():
        values[name] = [getattr(layer, field, None) for layer in config.layers[1::2]]
    return values | {
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_width,
        "kda_safe_gate": kda.lower_bound is not None,
        "kda_lower_bound": -5.0 if kda.lower_bound is None else kda.lower_bound,
        "layer_group_size": config.kinds[::2].index("latent_attention") + 1,
        "rope_theta": latent.rope_theta,
    }


def _values(config: ModelConfig, dtype: str, name: str, architecture: str) -> dict[str, Any]:
    """The fields that the families share, as Kimi calls them."""
    latent, moe = required(config, "latent_attention"), required(config, "moe")
    return (
        hf_values(config, dtype, name, architecture)
        | values_of(latent, _LATENT)
        | values_of(moe, _EXPERTS)
        | {
            "rms_norm_eps": config.norm_eps,
            "hidden_act": "silu",
            "num_hidden_layers": len(config.layers) // 2,
            "q_lora_rank": latent.query_rank,
            "intermediate_size": required(config, "mlp").hidden_size,
            "first_k_dense_replace": config.kinds.count("mlp"),
            "routed_scaling_factor": moe.scale,
            "num_shared_experts": moe.shared_size // moe.hidden_size,
        }
    )
