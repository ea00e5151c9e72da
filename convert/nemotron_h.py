"""Nemotron-H and its Puzzle variant: `NemotronHConfig` and `NemotronHPuzzleConfig`."""

from collections.abc import Mapping, Sequence
from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import tables
from stree_jax.convert.description import Description, Source, hf_values, limits, of_head, required
from stree_jax.convert.fields import MAX_LAYERS, Fields, Table, values_of
from stree_jax.convert.pure import MIXER
from stree_jax.heads import FOLDER, part_of
from stree_jax.models import AttentionConfig, LayerConfig, Mamba2Config, MlpConfig, MoeConfig
from stree_jax.models.config import ModelConfig

_MIXER: Table = MIXER | dict(
    num_heads=("mamba_num_heads", 128),
    head_dim=("mamba_head_dim", 64),
    state_size=("ssm_state_size", 128),
    chunk_size=("chunk_size", 128),
)
_EXPERTS: Table = dict(
    num_experts=("n_routed_experts", 8),
    num_active=("num_experts_per_tok", 2),
    hidden_size=("moe_intermediate_size", 7688),
    num_router_groups=("n_group", 1),
    num_active_groups=("topk_group", 1),
    normalise=("norm_topk_prob", True),
    scale=("routed_scaling_factor", 1.0),
    shared_size=("moe_shared_expert_intermediate_size", 7688),
)
_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


def read_nemotron_h(source: Source) -> Description:
    """`NemotronHConfig`: each layer is one mixer or one MLP; no RoPE."""
    fields = source.fields
    _read_aliases(fields)
    kinds = _nemotron_layers(fields)
    fields.check(not fields.has("sliding_window"), "sliding_window is not supported")
    layer = {kind: _layer(kind, fields, source) for kind in dict.fromkeys(kinds)}
    config = _config(source, [layer[kind] for kind in kinds])
    return _described("transformers nemotron_h", source, config)


def read_nemotron_h_puzzle(source: Source) -> Description:
    """`NemotronHPuzzleConfig`: Nemotron-H with different fields per layer.

    `block_configs` has a table for each layer: `block_type`, and what differs from the model's own
    fields: sizes and number of experts, `intermediate_size`, `ssm_state_size`, `sliding_window`.
    """
    fields = source.fields
    _read_aliases(fields)
    blocks = fields.take("block_configs")
    fields.check(
        isinstance(blocks, list)
        and 0 < len(blocks) <= MAX_LAYERS
        and all(isinstance(block, Mapping) for block in blocks),
        f"block_configs must be a list with a table for each layer, got {blocks!r:.80}",
    )
    layers = []
    for i, block in enumerate(blocks):
        part = fields.with_own(block, f"block_configs[{i}].")
        part.null("sliding_window")
        kind = part.choice("block_type", "", hybrid.KINDS)
        layers.append(_layer(kind, part, source))
        fields.absorb(part, block)
    fields.ignore(
        "redundant with block_configs",
        *("layers_block_type", "hybrid_override_pattern", "num_hidden_layers"),
        "blockwise_members",
    )
    fields.ignore("all attention layers have their own", "sliding_window")
    config = _config(source, layers)
    return _described("transformers nemotron_h_puzzle", source, config)


def _read_aliases(fields: Fields) -> None:
    fields.null("num_key_value_heads", "moe_latent_size", "sliding_window", "num_hidden_layers")
    fields.null("layers_block_type", "layer_types")
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


def _layer(kind: str, fields: Fields, source: Source) -> LayerConfig:
    """The config of a layer."""
    match kind:
        case "mamba2":
            return _mixer(fields, source)
        case "attention":
            return _attention(fields)
        case "mlp":
            return MlpConfig(
                fields.integer("intermediate_size", 21504),
                activation=_activation(fields),
                gated=False,
                bias=fields.flag("mlp_bias", False),
            )
        case _:
            fields.check(
                not fields.flag("mlp_bias", False), "mlp_bias = true with experts is not supported"
            )
            return _nemotron_experts(fields)


def _mixer(fields: Fields, source: Source) -> Mamba2Config:
    floor = fields.number("time_step_min", 1e-3)
    fields.choice("mamba_hidden_act", "silu", hybrid.SILU)  # there is no other
    mixer = Mamba2Config(
        **fields.read(_MIXER),
        dt_limit=hybrid.read_dt_limit(fields, floor, source.quirks),
        norm_eps=_epsilon(fields),
    )
    fields.same("mamba_num_groups", mixer.num_groups)
    fields.same("mamba_state_dim", mixer.state_size)
    return mixer


def _attention(fields: Fields) -> AttentionConfig:
    fields.check(
        not fields.flag("attention_bias", False),
        "attention_bias = true, but transformers' NemotronHAttention never has a bias",
    )
    num_heads = fields.integer("num_attention_heads", 32)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", 128),
        window=fields.integer("sliding_window") if fields.has("sliding_window") else None,
    )
    fields.same("num_query_groups", attention.num_kv_heads)
    return attention


def _epsilon(fields: Fields) -> float:
    epsilon = fields.positive("layer_norm_epsilon", 1e-5)
    for name in ("norm_eps", "rms_norm_eps"):
        fields.same(name, epsilon)
    return epsilon


def _activation(fields: Fields) -> str:
    known = {"relu2": "relu2", "silu": "silu", "gelu": "gelu"}
    return fields.choice("mlp_hidden_act", "relu2", known)


def _config(source: Source, layers: Sequence[LayerConfig]) -> ModelConfig:
    """The model, and the account of all fields that are not of one layer."""
    fields = source.fields
    config = ModelConfig(
        layers=tuple(layers),
        **hybrid.model_fields(
            fields,
            fields.integer("hidden_size", 4096),
            norm_eps=_epsilon(fields),
            residual_float32=fields.flag("residual_in_fp32", False),
            limited=False,
        ),
    )
    # Fields of layers that the model does not have are read too, so that a wrong value is refused.
    if "mamba2" not in config.kinds:
        _mixer(fields, source)
    if "attention" not in config.kinds:
        _attention(fields)
    _activation(fields)
    fields.flag("mlp_bias", False)
    fields.ignore("transformers reads use_bias instead", "mamba_proj_bias")
    fields.ignore("d_ssm is mamba_num_heads * mamba_head_dim", "expand")
    of_experts = (*(name for name, *_ in _EXPERTS.values()), "n_shared_experts", "moe_latent_size")
    fields.ignore("no layer has it", *of_experts, "intermediate_size")
    fields.ignore("nothing is rotated", *hybrid.ROPE)
    fields.ignore(
        "used in training only",
        *("hidden_dropout", "rescale_prenorm_residual"),
        *("time_step_max", "time_step_floor", "time_step_rank"),
    )
    fields.ignore("a choice of kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap")
    return config


def _described(family: str, source: Source, config: ModelConfig) -> Description:
    fields, heads = source.fields, part_of(FOLDER, "conversion")
    skipped = of_head(filter(heads.is_of_head, source.tensors))
    head = heads.read(
        fields,
        source.tensors,
        config.d_model,
        config.norm_eps,
        lambda: _attention(fields),
        lambda: _nemotron_experts(fields),
    )
    merged = any(name.endswith("mixer.experts.up_proj") for name in source.tensors)
    if not merged:
        hybrid.check_experts(fields, config, source.tensors)
    prefix = "model" if "model.norm_f.weight" in source.tensors else "backbone"
    rules = tables.nemotron_h(config, prefix, merged=merged)
    return hybrid.described(family, fields, config, rules, skipped)._replace(mtp=head)


def _nemotron_layers(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer, from a list or a string of letters."""
    if fields.has("layers_block_type"):
        fields.ignore(
            "redundant with layers_block_type", "hybrid_override_pattern", "num_hidden_layers"
        )
        return fields.layer_kinds("layers_block_type", hybrid.KINDS)
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


def _nemotron_experts(fields: Fields) -> MoeConfig:
    """The mixture of experts, with one shared expert."""
    fields.ignore("there is one shared expert", "n_shared_experts")
    return MoeConfig(
        **fields.read(_EXPERTS),
        router="sigmoid",
        latent_size=fields.integer("moe_latent_size") if fields.has("moe_latent_size") else None,
        activation=_activation(fields),
        gated=False,
    )


def write_nemotron_h(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`NemotronHConfig`."""
    m, a, mlp, moe = required(config, "mamba2"), config.attention, config.mlp, config.moe
    values = hf_values(config, dtype, "nemotron_h", "NemotronHForCausalLM") | {
        "layers_block_type": [hybrid.NAMES.get(kind, kind) for kind in config.kinds],
        **values_of(m, _MIXER),
        "time_step_limit": limits(m),
        "mamba_hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_float32,
    }
    if a is not None:
        values |= hybrid.head_values(a) | {"head_dim": a.head_dim}
    if mlp is not None:
        values |= {
            "intermediate_size": mlp.hidden_size,
            "mlp_bias": mlp.bias,
            "mlp_hidden_act": mlp.activation,
        }
    if moe is not None:
        values |= values_of(moe, _EXPERTS) | {
            "mlp_hidden_act": moe.activation,
            "moe_latent_size": moe.latent_size,
        }
    return values
