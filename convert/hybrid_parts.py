"""Helpers for reading and writing hybrid families."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from stree_jax.convert.description import Description, hf_values, limits, required, tied_head
from stree_jax.convert.fields import TRANSFORMERS, Fields, Table, values_of
from stree_jax.convert.rules import Ignored, Rule
from stree_jax.models import AttentionConfig, Mamba2Config, MlpConfig, MoeConfig, RopeScaling
from stree_jax.models.config import ModelConfig

# Layer kinds in the vocabularies of transformers 4 and 5.
KINDS = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
NAMES = {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"}
SILU = {"silu": "silu", "swish": "silu"}
_MIXER: Table = dict(
    num_heads=("mamba_n_heads", 128),
    state_size=("mamba_d_state", 256),
    num_groups=("mamba_n_groups", 1),
    conv_width=("mamba_d_conv", 4),
    conv_bias=("mamba_conv_bias", True),
    in_proj_bias=("mamba_proj_bias", False),
    out_proj_bias=("mamba_proj_bias", False),
    chunk_size=("mamba_chunk_size", 256),
)
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def read_mixer(
    fields: Fields, *, inner: int | None = None, eps_default: float = 1e-5, **more: Any
) -> tuple[Mamba2Config, int]:
    """The mixer of Bamba, Granite and Falcon-H1, and `d_model`.

    `inner` is its width; None: `mamba_expand * hidden_size`. `more` are fields of `Mamba2Config`.
    """
    d_model = fields.integer("hidden_size", 4096)
    if inner is None:
        inner = fields.integer("mamba_expand", 2) * d_model
    values = fields.read(_MIXER)
    num_heads = values["num_heads"]
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
    values |= dict(
        head_dim=head_dim,
        dt_limit=fields.limits("time_step_limit"),
        norm_eps=fields.positive("rms_norm_eps", eps_default),
    )
    return Mamba2Config(**(values | more)), d_model


def mixer_values(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_mixer`."""
    m = required(config, "mamba2")
    return values_of(m, _MIXER) | {
        "mamba_d_head": m.head_dim,
        "mamba_expand": max(1, m.inner_size // config.d_model),
        "time_step_limit": limits(m),
        "rms_norm_eps": config.norm_eps,
    }


def read_attention(fields: Fields, d_model: int, **more: Any) -> AttentionConfig:
    """Attention without RoPE, in the usual fields; `more` are fields of `AttentionConfig`."""
    num_heads = fields.integer("num_attention_heads", 32)
    fields.null("num_key_value_heads")
    bias = fields.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", max(1, d_model // num_heads)),
        qkv_bias=bias,
        out_bias=bias,
        **more,
    )


def llama_attention(fields: Fields, d_model: int, **more: Any) -> AttentionConfig:
    """As `read_attention`, of a config that must say the heads."""
    fields.null("head_dim")
    fields.integer("num_attention_heads")
    return read_attention(fields, d_model, **more)


def head_values(attention: AttentionConfig) -> dict[str, Any]:
    """The numbers of attention heads."""
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
    }


def attention_values(attention: AttentionConfig) -> dict[str, Any]:
    """The inverse of `read_attention`, except for `head_dim`."""
    return head_values(attention) | {"attention_bias": attention.qkv_bias}


def rotated(
    fields: Fields, attention: AttentionConfig, *default: float, plain: bool = False
) -> AttentionConfig:
    """The same attention with RoPE on all channels, as `Fields.rope` reads it."""
    theta, scaling, table = fields.rope(*default, plain=plain)
    table.finish()
    return dataclasses.replace(
        attention, rotary_dim=attention.head_dim, rope_theta=theta, rope_scaling=scaling
    )


def rope_values(attention: AttentionConfig, **more: Any) -> dict[str, Any]:
    """RoPE in the format of transformers 5; `more` are further entries."""
    scaling = attention.rope_scaling
    table = {"rope_type": "default"} if scaling is None else scaling_values(scaling)
    return {"rope_parameters": {"rope_theta": attention.rope_theta} | table | more}


def scaling_values(scaling: RopeScaling) -> dict[str, Any]:
    """Llama 3's RoPE scaling in the format of transformers."""
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def read_mlp(fields: Fields, **more: Any) -> MlpConfig:
    """A gated MLP in Llama's fields; `more` are fields of `MlpConfig`."""
    return MlpConfig(
        fields.integer("intermediate_size", 14336),
        activation=fields.choice("hidden_act", "silu", SILU),
        bias=fields.flag("mlp_bias", False),
        **more,
    )


def mlp_values(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_mlp`."""
    mlp = required(config, "mlp")
    return {
        "intermediate_size": mlp.hidden_size,
        "hidden_act": mlp.activation,
        "mlp_bias": mlp.bias,
    }


def model_fields(
    fields: Fields,
    d_model: int,
    *,
    norm_eps: float | None = None,
    eps_default: float = 1e-5,
    tied: bool = False,
    residual_float32: bool = False,
    vocab_size: int = 32000,
    limited: bool = True,
) -> dict[str, Any]:
    """Fields of `ModelConfig` that all families have.

    `norm_eps` None: that of `rms_norm_eps`, by default `eps_default`. `tied` is the default of
    `tie_word_embeddings`, `vocab_size` its own. A model whose length is not `limited` has no RoPE.
    """
    length = "max_position_embeddings"
    fields.null(length)
    if not limited:
        fields.ignore("without RoPE there is no limit", length)
    vocab_size = fields.integer("vocab_size", vocab_size)
    return dict(
        vocab_size=vocab_size,
        d_model=d_model,
        norm_eps=fields.positive("rms_norm_eps", eps_default) if norm_eps is None else norm_eps,
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        residual_float32=residual_float32,
        max_length=fields.integer(length) if limited and fields.has(length) else None,
        eos_token=fields.tokens("eos_token_id", vocab_size),
    )


def check_experts(fields: Fields, config: ModelConfig, tensors: Collection[str]) -> None:
    """Refuses more experts, stored one by one, than there are tensors, before each has names."""
    count = sum(layer.num_experts for layer in config.layers if isinstance(layer, MoeConfig))
    fields.check(
        not tensors or count <= len(tensors),
        f"{count} experts in all layers, but there are only {len(tensors)} tensors",
    )


def usual_values(
    config: ModelConfig, attention: AttentionConfig, *names: str, **of_rope: Any
) -> dict[str, Any]:
    """The fields of models of a mixer and an MLP a layer; `hf_values` gets the names."""
    return (
        hf_values(config, *names)
        | {"num_hidden_layers": len(config.layers) // 2}
        | attention_values(attention)
        | rope_values(attention, **of_rope)
        | max_length_values(config)
    )


def max_length_values(config: ModelConfig) -> dict[str, Any]:
    """The context length, which some models have not."""
    return {} if config.max_length is None else {"max_position_embeddings": config.max_length}


def read_dt_limit(fields: Fields, floor: float, quirks: Collection[str]) -> tuple[float, float]:
    """The clamp of the time step; with the quirk, transformers' undocumented clamp in prefill."""
    published = fields.limits("time_step_limit")
    return (floor, math.inf) if "hf_dt_floor" in quirks else published


def with_mlps(mixers: Collection[str], mlp: str = "mlp") -> tuple[str, ...]:
    """The layer kinds of a model in which an MLP follows every mixer."""
    return tuple(kind for mixer in mixers for kind in (mixer, mlp))


def positions_of(kinds: Collection[str], wanted: str) -> list[int]:
    """The indices of one kind in a list of kinds."""
    return [i for i, kind in enumerate(kinds) if kind == wanted]


def reciprocal(value: float) -> float:
    """The reciprocal of `value`, rounded to 9 digits if that inverts exactly."""
    short = float(f"{1 / value:.9g}")
    return short if 1 / short == value else 1 / value


def described(
    family: str,
    fields: Fields,
    config: ModelConfig,
    rules: list[Rule],
    ignored: Sequence[Ignored] = (),
) -> Description:
    """The description of a transformers checkpoint, all of whose fields were read."""
    fields.take("model_type", "")
    fields.ignore("of transformers, not of the model", *TRANSFORMERS, "use_mamba_kernels")
    ignored = [*tied_head(config, "lm_head.weight"), *ignored]
    return Description(family, config, rules, ignored, fields.finish())


def llama_parts(
    fields: Fields, width: int, norm_eps: float, **options: Any
) -> tuple[AttentionConfig, MlpConfig, float]:
    """The two parts of a Llama layer of a head, and its epsilon; `options`: of the attention."""
    attention = rotated(fields, llama_attention(fields, width, **options))
    has_biases = fields.flag("mlp_bias", False) or attention.qkv_bias
    fields.check(not has_biases, "biases in a head are not supported")
    fields.ignore(
        "of transformers, not of the head",
        *TRANSFORMERS,
        *("model_type", "max_position_embeddings", "tie_word_embeddings", "eos_token_id"),
    )
    activation = fields.choice("hidden_act", "silu", {"silu": "silu"})
    mlp = MlpConfig(fields.integer("intermediate_size"), activation=activation)
    return attention, mlp, fields.positive("rms_norm_eps", norm_eps)
