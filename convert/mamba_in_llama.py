"""MambaInLlama: Llamas with most attention layers distilled into Mamba-2.

A checkpoint has the config.json of the Llama and beside it a mamba_config.json.
"""

from typing import Any

from stree_jax.convert import hybrid_parts as hybrid
from stree_jax.convert import tables
from stree_jax.convert.description import Description, Source, hf_values, limits, required
from stree_jax.convert.fields import values_of
from stree_jax.convert.pure import SSM
from stree_jax.convert.rules import Ignored
from stree_jax.models import Mamba2Config, MlpConfig
from stree_jax.models.config import ModelConfig

MAMBA_CONFIG = "mamba_config.json"


def read_mamba_in_llama(source: Source) -> Description:
    """Llama's config.json and mamba_config.json."""
    fields, mamba = source.fields, source.beside[MAMBA_CONFIG]
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
        **ssm.read(SSM),
        dt_limit=ssm.limits("dt_limit"),
        norm_eps=1e-5,  # hard-coded in the mixer
    )
    ssm.ignore("overridden by upstream code", "expand", "headdim")
    num_layers = fields.num_layers()
    mamba.check(
        mamba.integer("n_layer") == num_layers, "n_layer is not config.json's num_hidden_layers"
    )
    with_attention = mamba.indices("attn_layers", num_layers)
    epsilon = fields.positive("rms_norm_eps", 1e-6)
    mamba.same("rms_norm_eps", epsilon)
    activation = fields.choice("hidden_act", "silu", hybrid.SILU)
    mamba.choice("hidden_act", activation, hybrid.SILU)
    mamba.ignore("redundant with config.json", "vocab_size", "tie_embeddings")
    hidden = mamba.integer("intermediate_size", fields.integer("intermediate_size"))
    attention = None
    if with_attention:
        attention = hybrid.llama_attention(fields, d_model)
        attention = hybrid.rotated(fields, attention, plain="plain_rope" in source.quirks)
    else:
        fields.ignore("no layer has attention", *hybrid.ROPE, *_LLAMA_ATTENTION)
    kinds = ["attention" if i in with_attention else "mamba2" for i in range(num_layers)]
    config = ModelConfig(
        layers=hybrid.with_mlps(kinds),
        mamba2=mamba2,
        attention=attention,
        mlp=MlpConfig(hidden, activation=activation, bias=fields.flag("mlp_bias", False)),
        **hybrid.model_fields(fields, d_model, norm_eps=epsilon, limited=bool(with_attention)),
    )
    rules = tables.llama_like(
        config,
        mlp=tables.within(tables.split_mlp(required(config, "mlp")), "mlp"),
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
    )
    skipped = [
        Ignored(name, "computed from the config")
        for name in source.tensors
        if name.endswith("rotary_emb.inv_freq")
    ]
    ssm.finish()
    description = hybrid.described("MambaInLlama", fields, config, rules, skipped)
    return description._replace(notes=description.notes + mamba.finish())


_LLAMA_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias")


def write_mamba_in_llama(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of MambaInLlama."""
    a = config.attention
    values = hf_values(config, dtype, "llama", "LlamaForCausalLM") | {
        "num_hidden_layers": len(config.layers) // 2,
        "num_attention_heads": required(config, "mamba2").num_heads,
        "rms_norm_eps": config.norm_eps,
    }
    values |= hybrid.mlp_values(config) | hybrid.max_length_values(config)
    if a is not None:
        values |= hybrid.attention_values(a) | {
            "head_dim": a.head_dim,
            "rope_theta": a.rope_theta,
            "rope_scaling": hybrid.scaling_values(a.rope_scaling) if a.rope_scaling else None,
        }
    return values


def write_mamba_config(config: ModelConfig) -> dict[str, Any]:
    """mamba_config.json of MambaInLlama."""
    m, mlp = required(config, "mamba2"), required(config, "mlp")
    return {
        "d_model": config.d_model,
        "ssm_cfg": {
            "expand": 1,
            "ngroups": m.num_heads,
            "d_state": m.state_size,
            "repeat_kv_before_conv": m.repeat_before_conv,
            **values_of(m, SSM),
            "dt_limit": limits(m),
        },
        "rms_norm_eps": config.norm_eps,
        "vocab_size": None,
        "d_inner": m.inner_size,
        "d_xb": m.x_heads * m.head_dim,
        "intermediate_size": mlp.hidden_size,
        "hidden_act": mlp.activation,
        "n_layer": len(config.layers) // 2,
        "attn_layers": hybrid.positions_of(config.kinds[::2], "attention"),
    }
