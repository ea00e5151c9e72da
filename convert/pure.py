"""Pure Mamba-2 families, and mamba_ssm's hybrids with attention.

The formats are mamba_ssm's `MambaConfig`, `Mamba2` and `MHA`, transformers' `Mamba2Config`, and
Mistral's `params.json`.
"""

import dataclasses
from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import tables
from stree_jax.convert.description import (
    Description,
    Source,
    hf_values,
    limits,
    norm_kind,
    required,
    tied_head,
)
from stree_jax.convert.fields import MAX_LAYERS, Fields, Table, values_of
from stree_jax.models import AttentionConfig, Mamba2Config, MlpConfig
from stree_jax.models.config import ModelConfig

# Of mamba_ssm's `ssm_cfg`, whatever the sizes of heads are.
SSM: Table = dict(
    conv_width=("d_conv", 4),
    conv_bias=("conv_bias", True),
    in_proj_bias=("bias", False),
    out_proj_bias=("bias", False),
    chunk_size=("chunk_size", 256),
)
_SSM: Table = SSM | dict(
    head_dim=("headdim", 64),
    state_size=("d_state", 128),
    num_groups=("ngroups", 1),
    d_per_channel=("D_has_hdim", False),
)
_ATTENTION: Table = dict(
    num_heads=("num_heads",),
    rotary_dim=("rotary_emb_dim", 0),
    rope_theta=("rotary_emb_base", 10000.0),
    qkv_bias=("qkv_proj_bias", True),
    out_bias=("out_proj_bias", True),
    conv_width=("d_conv", 0),
)
# Of transformers.
MIXER: Table = dict(
    num_heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    state_size=("state_size", 128),
    num_groups=("n_groups", 8),
    conv_width=("conv_kernel", 4),
    conv_bias=("use_conv_bias", True),
    in_proj_bias=("use_bias", False),
    out_proj_bias=("use_bias", False),
    chunk_size=("chunk_size", 256),
)


def read_mamba_ssm(source: Source) -> Description:
    """mamba_ssm's `MambaConfig`, with or without attention layers."""
    fields = source.fields
    fields.null("attn_layer_idx", "attn_cfg")
    ssm = fields.table("ssm_cfg")
    ssm.null("d_ssm")
    layer = ssm.take("layer", "Mamba1")
    if layer != "Mamba2":
        raise ValueError(
            f"{fields.path}: ssm_cfg.layer is {layer!r:.80}"
            + (" (the default)" if "layer" not in ssm.values else "")
            + "; only Mamba-2 is supported"
        )
    if not fields.flag("rms_norm", True):
        raise ValueError(f"{fields.path}: rms_norm = false (LayerNorm) is not supported")
    d_model = fields.integer("d_model")
    inner = ssm.integer("expand", 2) * d_model
    d_ssm = ssm.integer("d_ssm", inner)
    sizes = ssm.read(_SSM)
    head_dim = sizes["head_dim"]
    fields.check(d_ssm % head_dim == 0, f"headdim = {head_dim} does not divide d_ssm = {d_ssm}")
    fields.check(d_ssm <= inner, f"d_ssm = {d_ssm} is larger than expand * d_model = {inner}")
    norm_first = ssm.flag("norm_before_gate", False)
    mixer = Mamba2Config(
        **sizes,
        num_heads=d_ssm // head_dim,
        mlp_dim=inner - d_ssm,
        dt_limit=ssm.limits("dt_limit"),
        norm=norm_kind(ssm.flag("rmsnorm", True), norm_first),
    )
    ssm.ignore("initialisation", "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor")
    ssm.ignore("a choice of kernels", "use_mem_eff_path")
    fields.ignore("a choice of kernels", "fused_add_norm")
    # mamba_ssm rounds the width of the MLP up to a multiple of 128.
    hidden = -(-fields.integer("d_intermediate", 0, least=0) // 128) * 128
    num_layers = fields.integer("n_layer", most=MAX_LAYERS)
    with_attention = fields.indices("attn_layer_idx", num_layers)
    layers: list[str] = []
    for layer in range(num_layers):
        layers.append("attention" if layer in with_attention else "mamba2")
        layers += ["mlp"] if hidden else []
    attention = None
    if with_attention:
        attention = _mamba_ssm_attention(fields.table("attn_cfg"), d_model)
    else:
        fields.ignore("attention settings; no layer has attention", "attn_cfg")
    config = ModelConfig(
        d_model=d_model,
        layers=tuple(layers),
        mamba2=mixer,
        attention=attention,
        mlp=MlpConfig(hidden) if hidden else None,
        residual_float32=fields.flag("residual_in_fp32", True),
        **_vocabulary(fields, default_multiple=8),
    )
    ssm.finish()
    notes = fields.finish()
    rules = tables.mamba_ssm(config, embedding="embedding")
    return Description("mamba_ssm", config, rules, tied_head(config, "lm_head.weight"), notes)


def _mamba_ssm_attention(fields: Fields, d_model: int) -> AttentionConfig:
    """The settings of mamba_ssm's MHA."""
    fields.null("num_heads_kv", "head_dim", "softmax_scale")
    fields.check(
        fields.flag("causal", False), "attn_cfg.causal is not true (upstream's default is false)"
    )
    fields.check(
        not fields.flag("rotary_emb_interleaved", False),
        "attn_cfg.rotary_emb_interleaved = true is not supported",
    )
    sizes = fields.read(_ATTENTION)
    num_heads = sizes["num_heads"]
    if not fields.has("head_dim"):
        fields.check(
            d_model % num_heads == 0,
            f"attn_cfg.num_heads = {num_heads} does not divide d_model = {d_model}",
        )
    # mlp_dim counts both halves of the gated branch and is rounded up to a multiple of 256.
    mlp_width = -(-fields.integer("mlp_dim", 0, least=0) // 256) * 256
    config = AttentionConfig(
        **sizes,
        num_kv_heads=fields.integer("num_heads_kv", num_heads),
        head_dim=fields.integer("head_dim", d_model // num_heads),
        scale=fields.number("softmax_scale") if fields.has("softmax_scale") else None,
        mlp_dim=mlp_width // 2,
    )
    fields.finish()
    return config


def write_mamba_ssm(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """mamba_ssm's config.json, which does not name the dtype."""
    m, a = required(config, "mamba2"), config.attention
    values: dict[str, Any] = {
        "d_model": config.d_model,
        "d_intermediate": 0 if config.mlp is None else config.mlp.hidden_size,
        "n_layer": sum(kind != "mlp" for kind in config.kinds),
        "vocab_size": config.vocab_size,
        "ssm_cfg": {
            "layer": "Mamba2",
            **values_of(m, _SSM),
            "d_ssm": m.inner_size,
            "expand": (m.inner_size + m.mlp_dim) // config.d_model,
            "rmsnorm": m.norm != "none",
            "norm_before_gate": m.norm == "norm_then_gate",
            "dt_limit": limits(m),
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_float32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": config.num_embeddings,
        "tie_embeddings": config.tie_embeddings,
    }
    if a is not None:
        mixers = [kind for kind in config.kinds if kind != "mlp"]
        values["attn_layer_idx"] = [i for i, kind in enumerate(mixers) if kind == "attention"]
        values["attn_cfg"] = {
            **values_of(a, _ATTENTION),
            "causal": True,
            "num_heads_kv": a.num_kv_heads,
            "head_dim": a.head_dim,
            "mlp_dim": 2 * a.mlp_dim,
            "softmax_scale": a.scale,
            "rotary_emb_interleaved": False,
        }
    return values


def is_codestral(source: Source) -> bool:
    """True if a params.json is Codestral-Mamba's, and not of a transformer."""
    values = source.fields.values
    mamba = values.get("model_type") in (None, "mamba")
    return "dim" in values and "n_heads" not in values and mamba


def read_codestral(source: Source) -> Description:
    """Mistral's params.json for Codestral-Mamba."""
    fields = source.fields
    fields.take("model_type", "mamba")
    fields.check(fields.flag("rms_norm", True), "rms_norm = false (LayerNorm) is not supported")
    fields.ignore("a choice of kernels", "fused_add_norm")
    # Its code hard-codes a head size of 64, a state size of 128 and an expansion of 2.
    config = ModelConfig.mamba2_lm(
        d_model=fields.integer("dim"),
        num_layers=fields.integer("n_layers", most=MAX_LAYERS),
        num_groups=fields.integer("n_groups", 1),
        chunk_size=256,
        **_vocabulary(fields, default_multiple=1),
    )
    config = dataclasses.replace(config, residual_float32=fields.flag("residual_in_fp32", True))
    notes = fields.finish()
    rules = tables.mamba_ssm(config, embedding="embedding", prefix="model.")
    return Description(
        "Codestral-Mamba", config, rules, tied_head(config, "model.lm_head.weight"), notes
    )


def read_mamba2(source: Source) -> Description:
    """`Mamba2Config` of transformers."""
    fields = source.fields
    fields.choice("hidden_act", "silu", hybrid.SILU)
    d_model = fields.integer("hidden_size", 4096)
    sizes = fields.read(MIXER)
    num_heads, head_dim = sizes["num_heads"], sizes["head_dim"]
    expand = fields.number("expand", 2)
    fields.check(
        expand * d_model == num_heads * head_dim,
        f"expand * hidden_size = {expand:g} * {d_model} is not num_heads * head_dim ="
        f" {num_heads} * {head_dim}",
    )
    epsilon = fields.positive("layer_norm_epsilon", 1e-5)
    config = ModelConfig(
        layers=("mamba2",) * fields.num_layers(64),
        mamba2=Mamba2Config(**sizes, dt_limit=fields.limits("time_step_limit"), norm_eps=epsilon),
        **hybrid.model_fields(
            fields,
            d_model,
            norm_eps=epsilon,
            residual_float32=fields.flag("residual_in_fp32", True),
            vocab_size=32768,
            limited=False,
        ),
    )
    fields.ignore(
        "initialisation",
        *("rescale_prenorm_residual", "time_step_rank"),
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"),
        "time_step_scale",
    )
    fields.ignore("transformers never read it; its mixer gates first", "norm_before_gate")
    fields.ignore("transformers never read it; its mixer always norms", "rms_norm")
    fields.ignore("derived from expand * hidden_size", "intermediate_size")
    # The oldest conversions have mamba_ssm's name of the embedding, which transformers renames.
    old = "backbone.embedding.weight" in source.tensors
    rules = tables.mamba_ssm(config, embedding="embedding" if old else "embeddings")
    return hybrid.described("transformers mamba2", fields, config, rules)


def _vocabulary(fields: Fields, *, default_multiple: int) -> dict[str, Any]:
    """mamba_ssm's vocabulary: the config has the real size, the tensors have the padded one."""
    size = fields.integer("vocab_size")
    multiple = fields.integer("pad_vocab_size_multiple", default_multiple)
    return dict(
        vocab_size=size,
        padded_vocab_size=-(-size // multiple) * multiple,
        tie_embeddings=fields.flag("tie_embeddings", True),
    )


def write_mamba2(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`Mamba2Config` of transformers."""
    m = required(config, "mamba2")
    return hf_values(config, dtype, "mamba2", "Mamba2ForCausalLM") | {
        **values_of(m, MIXER),
        "num_hidden_layers": len(config.layers),
        "expand": m.inner_size // config.d_model,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "time_step_limit": limits(m),
        "residual_in_fp32": config.residual_float32,
    }
