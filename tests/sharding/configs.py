"""Models that can be cut into 4 shards, most of them into 8: one for each way of being cut."""

import dataclasses

from stree_jax import ModelConfig
from stree_jax.models import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    ShortConvConfig,
)
from stree_jax.testing import HYBRIDS

_MAMBA2 = Mamba2Config(num_heads=8, head_dim=8, state_size=8, chunk_size=8)
_ATTENTION = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=8, rotary_dim=4)
_GATED = dataclasses.replace(_ATTENTION, qk_norm_eps=1e-6, output_gate=True)


def _gated_delta(**changes):
    sizes = dict(num_heads=8, head_dim=8, num_groups=2, state_size=12, chunk_size=8)
    return GatedDeltaConfig(**sizes | changes)


def _mamba2(**changes):
    return dataclasses.replace(_MAMBA2, **changes)


def _model(*layers, **parts):
    """Untied, since with tied embeddings a random model repeats itself."""
    shape = dict(
        vocab_size=40,
        d_model=16,
        layers=layers,
        mamba2=_MAMBA2,
        tie_embeddings=False,
        residual_float32=False,
    )
    return ModelConfig(**(shape | parts))


CONFIGS = {
    # A norm over all heads, which commutes with the projection; one group of B and C for all.
    "mamba2": _model("mamba2", "mamba2", residual_float32=True),
    "one layer": _model("mamba2"),
    # Words of which some do not exist, on the last shard.
    "tied": _model(
        "mamba2", vocab_size=37, padded_vocab_size=40, tie_embeddings=True, embedding_multiplier=3.0
    ),
    # Groups of the norm, one for each of 4 shards: it is theirs alone, and does not commute.
    "groups": _model("mamba2", "mamba2", mamba2=_mamba2(num_groups=4, norm_groups=4)),
    # The same norm over all heads where it cannot be deferred.
    "branch": _model(
        "mamba2",
        mamba2=_mamba2(mlp_dim=8, in_proj_bias=True, out_proj_bias=True, d_per_channel=True),
    ),
    "norm_then_gate": _model(
        "mamba2", mamba2=_mamba2(norm="norm_then_gate", conv_bias=False, out_proj_bias=True)
    ),
    # Layers of one kind that differ in size, and a window of attention.
    "mixed": _model(
        _MAMBA2,
        dataclasses.replace(_ATTENTION, window=3),
        MoeConfig(num_experts=8, num_active=2, hidden_size=12),
        _mamba2(num_heads=16, head_dim=4, state_size=4, conv_width=3),
        dataclasses.replace(_ATTENTION, num_kv_heads=8, rotary_dim=0),
        MoeConfig(num_experts=4, num_active=1, hidden_size=64, shared_size=16),
    ),
    "bamba": _model(
        *("mamba2", "mlp", "attention", "mlp"),
        attention=dataclasses.replace(_ATTENTION, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(24, bias=True),
    ),
    # A norm of each head; heads of x and of keys that several shards hold.
    "mamba_in_llama": _model(
        *("mamba2", "mlp", "attention"),
        mamba2=_mamba2(head_dim=4, state_size=4, num_groups=8, num_x_heads=2, num_b_groups=2),
        attention=_ATTENTION,
        mlp=MlpConfig(24),
    ),
    "repeated_first": _model(
        "mamba2",
        mamba2=_mamba2(
            num_groups=4, norm_groups=8, num_x_heads=2, num_b_groups=2, repeat_before_conv=True
        ),
    ),
    "mamba2attn": _model(
        *("mamba2", "attention"),
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=1, head_dim=8, rotary_dim=4, conv_width=3, mlp_dim=8
        ),
    ),
    "falcon_h1": _model(
        *("parallel", "mlp"),
        mamba2=dataclasses.replace(HYBRIDS["falcon_h1"].mamba2, num_heads=8),
        attention=dataclasses.replace(_ATTENTION, key_multiplier=0.7, output_multiplier=0.9),
        mlp=HYBRIDS["falcon_h1"].mlp,
        logits_multiplier=0.5,
    ),
    "granite_moe": _model(
        *("mamba2", "moe", "attention", "moe"),
        attention=_ATTENTION,
        # Wide enough for 8 shards to have a part of every expert.
        moe=MoeConfig(num_experts=4, num_active=2, hidden_size=128, shared_size=8),
        residual_multiplier=0.6,
    ),
    # So narrow that shards have whole experts.
    "nemotron_h": _model(
        *("mamba2", "mlp", "attention", "moe"),
        mamba2=_mamba2(num_groups=8),
        attention=_ATTENTION,
        mlp=HYBRIDS["nemotron_h"].mlp,
        moe=dataclasses.replace(
            HYBRIDS["nemotron_h"].moe,
            num_experts=8,
            num_router_groups=4,
            hidden_size=16,
            shared_size=8,
        ),
    ),
    "zamba2": _model(
        *("shared", "mamba2") * 2,
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=8, head_dim=8, input_multiple=2, rotary_dim=8
        ),
        mlp=HYBRIDS["zamba2"].mlp,
        shared=HYBRIDS["zamba2"].shared,
    ),
    "qwen3_5": _model(
        *("gated_delta", "mlp", "attention", "mlp"),
        gated_delta=_gated_delta(num_groups=8),
        attention=_GATED,
        mlp=MlpConfig(24),
        norm_float32=True,
    ),
    # Heads of keys that several shards hold, and an expert for all with a gate of its own.
    "qwen3_next": _model(
        *("gated_delta", "moe", "attention", "moe"),
        gated_delta=_gated_delta(),
        attention=_GATED,
        moe=MoeConfig(
            num_experts=4, num_active=2, hidden_size=128, shared_size=8, shared_gate=True
        ),
        norm_float32=True,
    ),
    # Norms over the heads of all shards, and norms of outputs.
    "olmo_hybrid": _model(
        *(_gated_delta(beta_scale=2.0), MlpConfig(24)),
        dataclasses.replace(
            _ATTENTION, num_kv_heads=4, qk_norm_eps=1e-6, qk_norm_spans=True, norm_after=True
        ),
        MlpConfig(24, norm_after=True),
    ),
    # Latents and gates of low rank that all shards have, and an MLP with limits.
    "bailing_hybrid": _model(
        LatentAttentionConfig(8, 16, 8, 8, 4, rope_theta=100.0, query_rank=12, output_gate=True),
        *(MlpConfig(24, limit=0.5), LatentAttentionConfig(8, 16, 8, 4, 6)),
        GatedDeltaConfig(8, 8, 8, 8, by_channel=True, gate_rank=6),
        GatedDeltaConfig(8, 8, 8, 8, by_channel=True, lower_bound=-5.0),
    ),
    "lfm2": _model(
        *("short_conv", "mlp", "attention", "mlp"),
        short_conv=ShortConvConfig(16, bias=True),
        attention=dataclasses.replace(_ATTENTION, qk_norm_eps=1e-5),
        mlp=MlpConfig(24),
    ),
    # Gates of heads, and norms after layers too.
    "lfm3": _model(
        *("short_conv", "mlp", "attention", "mlp"),
        short_conv=ShortConvConfig(16, conv_width=7),
        attention=dataclasses.replace(_GATED, gate_per_head=True),
        mlp=MlpConfig(24),
        sandwich_norms=True,
    ),
}
