"""A small config of each family, in sizes that the Pallas kernels accept."""

import functools
from typing import Any

import stree_jax as st
from stree_jax.layer_config import (
    AttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    RopeScaling,
    SharedConfig,
)

_WIDTH = 64
_mixer = functools.partial(Mamba2Config, num_heads=4, head_dim=32, state_size=16, chunk_size=16)
_attention = functools.partial(AttentionConfig, num_heads=4, num_kv_heads=2, head_dim=16)


def _hybrid(*layers: str, **parts: Any) -> st.ModelConfig:
    """Not tied: with tied embeddings a random model repeats itself."""
    shape: dict[str, Any] = dict(
        vocab_size=512,
        d_model=_WIDTH,
        layers=layers,
        mamba2=_mixer(),
        mlp=MlpConfig(96),
        tie_embeddings=False,
        residual_float32=False,
    )
    return st.ModelConfig(**(shape | parts))


FAMILIES = {
    "mamba_ssm": _hybrid(
        *("mamba2", "mlp", "mamba2", "mlp"),
        vocab_size=500,
        padded_vocab_size=512,
        mamba2=_mixer(norm="norm_then_gate"),
        residual_float32=True,
    ),
    "Mamba-2": st.ModelConfig.mamba2_lm(
        512, 128, 4, head_dim=64, state_size=64, tie_embeddings=False
    ),
    "Codestral-Mamba": _hybrid(
        *("mamba2",) * 3, mamba2=_mixer(num_heads=8, head_dim=16, num_groups=4)
    ),
    "MambaInLlama": _hybrid(
        *("mamba2", "mlp", "attention", "mlp"),
        mamba2=_mixer(head_dim=16, num_groups=4, num_x_heads=2, num_b_groups=2),
        attention=_attention(
            rotary_dim=16, rope_theta=100.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 24)
        ),
    ),
    "mamba2attn": _hybrid(
        *("mamba2", "attention", "mamba2"),
        attention=_attention(rotary_dim=8, conv_width=3, mlp_dim=16),
        residual_float32=True,
    ),
    "Falcon-H1": _hybrid(
        *("parallel", "mlp", "parallel", "mlp"),
        mamba2=_mixer(norm="none", input_multiplier=1.25, output_multiplier=0.8),
        attention=_attention(rotary_dim=16, key_multiplier=0.7),
    ),
    "Bamba": _hybrid(
        *("mamba2", "mlp", "attention", "mlp"),
        attention=_attention(rotary_dim=8, qkv_bias=True, out_bias=True),
    ),
    "Nemotron-H": _hybrid(
        *("mamba2", "mlp", "attention", "moe"),
        attention=_attention(),
        mlp=MlpConfig(96, activation="relu2", gated=False),
        moe=MoeConfig(6, 2, 32, router="sigmoid", activation="relu2", gated=False),
    ),
    "Granite-4-H": _hybrid(
        *("mamba2", "moe", "attention", "moe"),
        attention=_attention(scale=0.2),
        moe=MoeConfig(4, 2, 32, shared_size=32),
        mlp=None,
    ),
    "Zamba2": _hybrid(
        *("mamba2", "shared", "mamba2", "shared", "mamba2"),
        attention=_attention(num_kv_heads=4, input_multiple=2, scale=0.5, rotary_dim=16),
        shared=SharedConfig(1, adapter_rank=4, attention_adapters=True),
    ),
}
