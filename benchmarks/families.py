"""A small config of each family: those of `stree_jax.testing`, in sizes that the kernels accept."""

import dataclasses
from typing import Any

import stree_jax as st
from stree_jax.testing import HYBRIDS


def _enlarged(config: st.ModelConfig, **changes: Any) -> st.ModelConfig:
    """The config with the least sizes of heads, states and experts for Pallas."""

    def with_sizes(part: Any, **sizes: Any) -> Any:
        return part and dataclasses.replace(part, **sizes)

    attention, moe = config.attention, config.moe
    rotary = attention and 16 * attention.rotary_dim // attention.head_dim
    latent = moe and moe.latent_size and 32
    parts = dict(
        mamba2=with_sizes(config.mamba2, head_dim=16, state_size=16, chunk_size=16),
        gated_delta=with_sizes(config.gated_delta, head_dim=16, state_size=16, chunk_size=16),
        attention=with_sizes(attention, head_dim=16, rotary_dim=rotary),
        moe=with_sizes(moe, hidden_size=32, latent_size=latent, shared_size=32),
    )
    sizes: dict[str, Any] = dict(vocab_size=500, padded_vocab_size=512, d_model=64)
    return dataclasses.replace(config, **sizes | parts | changes)


_BAMBA = _enlarged(HYBRIDS["bamba"])
FAMILIES = {
    "mamba_ssm": dataclasses.replace(
        _BAMBA.with_layers(("mamba2", "mlp") * 2),
        mamba2=dataclasses.replace(_BAMBA.mamba2, norm="norm_then_gate"),
        residual_float32=True,
    ),
    # Not tied: with tied embeddings a random model repeats itself.
    "Mamba-2": st.ModelConfig.mamba2_lm(
        512, 128, 4, head_dim=64, state_size=64, tie_embeddings=False
    ),
    "Codestral-Mamba": dataclasses.replace(
        _BAMBA.with_layers(("mamba2",) * 3),
        mamba2=dataclasses.replace(_BAMBA.mamba2, num_heads=8, num_groups=4),
    ),
    "MambaInLlama": _enlarged(HYBRIDS["mamba_in_llama"]),
    "mamba2attn": _enlarged(HYBRIDS["mamba2attn"]),
    "Falcon-H1": _enlarged(HYBRIDS["falcon_h1"]),
    "Bamba": _BAMBA,
    "Nemotron-H": _enlarged(HYBRIDS["nemotron_h"]),
    "Granite-4-H": _enlarged(HYBRIDS["granite_moe"]),
    "Zamba2": _enlarged(HYBRIDS["zamba2"]),
    "Qwen3.5": _enlarged(HYBRIDS["qwen3_5"]),
    "Qwen3-Next": _enlarged(HYBRIDS["qwen3_next"]),
}
