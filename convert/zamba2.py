"""Zamba2: transformers' `Zamba2Config`."""

from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import tables
from stree_jax.convert.description import Description, Source, hf_values, required
from stree_jax.convert.fields import Fields, Table, values_of
from stree_jax.models import AttentionConfig, Mamba2Config, MlpConfig, SharedConfig
from stree_jax.models.config import ModelConfig

_MIXER: Table = dict(
    num_heads=("n_mamba_heads", 8),
    state_size=("mamba_d_state", 64),
    num_groups=("mamba_ngroups", 1),
    conv_width=("mamba_d_conv", 4),
    chunk_size=("chunk_size", 256),
)
_KINDS = {"mamba": "mamba2", "linear_attention": "mamba2", "hybrid": "shared"}


def read_zamba2(source: Source) -> Description:
    """`Zamba2Config`: a Mamba-2 stack with shared transformer blocks."""
    fields = source.fields
    fields.null("num_key_value_heads", "intermediate_size", "sliding_window", "time_step_limit")
    old = sorted({"conv_dimension", "state_size", "lora_rank"} & set(fields.values))
    fields.check(
        not old, f"fields {old} are of Zamba2's first code; take the model's newest revision"
    )
    d_model = fields.integer("hidden_size", 2560)
    fields.check(
        not fields.flag("use_long_context", False),
        "use_long_context = true is not supported: transformers 4 and 5 disagree on its RoPE",
    )
    fields.alias(layers_block_type="layer_types")
    num_layers = fields.num_layers(54)
    kinds = fields.layer_kinds("layers_block_type", _KINDS, num_layers)
    num_uses = kinds.count("shared")
    fields.check(num_uses > 0, "no layer of layers_block_type is 'hybrid'; use mamba2")
    num_blocks = fields.integer("num_mem_blocks", 1)
    bias = fields.flag("add_bias_linear", False)
    mamba2 = _mixer(source, d_model, bias)
    has_rope = fields.flag("use_mem_rope", False)
    attention = _attention(fields, d_model, has_rope)
    adapters = fields.flag("use_shared_attention_adapter", False)
    fields.check(
        not adapters or attention.num_kv_heads == attention.num_heads,
        "adapters on grouped keys and values are not possible in transformers",
    )
    layers: list[str] = []
    for kind in kinds:
        layers += ["shared", "mamba2"] if kind == "shared" else ["mamba2"]
    config = ModelConfig(
        layers=tuple(layers),
        mamba2=mamba2,
        attention=attention,
        mlp=MlpConfig(
            fields.integer("intermediate_size", 4 * d_model),
            activation=fields.choice("hidden_act", "gelu", {"gelu": "gelu"} | hybrid.SILU),
            bias=bias,
        ),
        shared=SharedConfig(
            min(num_blocks, num_uses), fields.integer("adapter_rank", 128), adapters
        ),
        **hybrid.model_fields(fields, d_model, tied=True, limited=has_rope),
    )
    fields.ignore(
        "derived from other fields",
        *("attention_head_dim", "attention_hidden_size", "head_dim"),
        *("hybrid_layer_ids", "kv_channels", "mamba_headdim", "num_query_groups"),
    )
    fields.ignore("never read: the convolution has a bias", "use_conv_bias")
    fields.ignore("a choice of kernels", "use_mem_eff_path")
    fields.ignore("used in training only", "time_step_max", "time_step_floor")
    fields.check(not fields.has("sliding_window"), "sliding_window is not supported")
    return hybrid.described("transformers zamba2", fields, config, tables.zamba2(config))


def _mixer(source: Source, d_model: int, bias: bool) -> Mamba2Config:
    fields = source.fields
    inner = fields.integer("mamba_expand", 2) * d_model
    sizes = fields.read(_MIXER)
    num_heads = sizes["num_heads"]
    fields.check(inner % num_heads == 0, f"n_mamba_heads = {num_heads} does not divide {inner}")
    return Mamba2Config(
        **sizes,
        head_dim=inner // num_heads,
        conv_bias=True,
        in_proj_bias=bias,
        out_proj_bias=bias,
        dt_limit=hybrid.read_dt_limit(fields, fields.number("time_step_min", 1e-3), source.quirks),
        norm_eps=1e-5,  # hard-coded in transformers; rms_norm_eps does not change it
    )


def _attention(fields: Fields, d_model: int, has_rope: bool) -> AttentionConfig:
    heads = fields.integer("num_attention_heads", 32)
    fields.check(
        2 * d_model % heads == 0,
        f"num_attention_heads = {heads} does not divide 2 * hidden_size = {2 * d_model}",
    )
    head_dim = 2 * d_model // heads
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        input_multiple=2,
        scale=(head_dim / 2) ** -0.5,
    )
    rotated = hybrid.rotated(fields, attention)
    return rotated if has_rope else attention


def write_zamba2(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Zamba2Config`."""
    m, a, mlp, shared = (
        required(config, kind) for kind in ("mamba2", "attention", "mlp", "shared")
    )
    kinds = []
    for above, kind in zip((None, *config.kinds), config.kinds, strict=False):
        if kind != "shared":
            kinds.append("hybrid" if above == "shared" else "linear_attention")
    return (
        hf_values(config, dtype, "zamba2", "Zamba2ForCausalLM")
        | hybrid.rope_values(a)
        | hybrid.head_values(a)
        | values_of(m, _MIXER)
        | {
            "num_hidden_layers": len(kinds),
            "layers_block_type": kinds,
            "num_mem_blocks": shared.num_blocks,
            "adapter_rank": shared.adapter_rank,
            "use_shared_attention_adapter": shared.attention_adapters,
            "use_mem_rope": a.rotary_dim > 0,
            "intermediate_size": mlp.hidden_size,
            "hidden_act": mlp.activation,
            "add_bias_linear": m.in_proj_bias,
            "mamba_expand": m.inner_size // config.d_model,
            "rms_norm_eps": config.norm_eps,
            "max_position_embeddings": config.max_length or 1 << 12,
        }
    )
