"""Shapes of published models by name, for benchmarks and compiling.

`ModelConfig.preset` reads this table. Sizes come from the published configs. A checkpoint brings
its own config and never uses a preset.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from stree_jax.models.attention import AttentionConfig, RopeScaling
from stree_jax.models.gated_delta import GatedDeltaConfig
from stree_jax.models.latent_attention import LatentAttentionConfig
from stree_jax.models.mamba2 import Mamba2Config
from stree_jax.models.mlp import MlpConfig
from stree_jax.models.moe import MoeConfig
from stree_jax.models.shared import SharedConfig
from stree_jax.models.short_conv import ShortConvConfig

# Fields of `ModelConfig`, which imports this table.
Preset = dict[str, Any]


def _hybrid(vocab_size: int, d_model: int, layers: Iterable[Any], **options: Any) -> Preset:
    """A model whose residual stream has the dtype of its weights."""
    return dict(
        vocab_size=vocab_size,
        d_model=d_model,
        layers=tuple(layers),
        residual_float32=False,
        **options,
    )


def _mixers(num_layers: int, attention_layers: Collection[int], kind: str = "mamba2") -> list[str]:
    """Attention in some layers, and a mixer of this kind in the others."""
    return ["attention" if i in attention_layers else kind for i in range(num_layers)]


def _in_pairs(mixers: Iterable[Any], after: str) -> list[Any]:
    """Each mixer with what comes after it."""
    return [kind for mixer in mixers for kind in (mixer, after)]


def _mamba2(d_model: int, num_layers: int) -> Preset:
    """state-spaces/mamba2-*."""
    return dict(
        vocab_size=50277,
        d_model=d_model,
        layers=("mamba2",) * num_layers,
        mamba2=Mamba2Config(
            num_heads=2 * d_model // 64, head_dim=64, state_size=128, chunk_size=256
        ),
        padded_vocab_size=50288,
    )


def _mamba_in_llama(
    d_model: int,
    num_layers: int,
    *,
    mlp: int,
    inner: int,
    kv_heads: int = 8,
    attention_layers: Collection[int] = (),
    rope_factor: float = 8.0,
    **options: Any,
) -> Preset:
    """MambaInLlama's distilled Llamas and STree's draft model: heads and states of 128."""
    heads = inner // 128
    return _hybrid(
        vocab_size=128256,
        d_model=d_model,
        layers=_in_pairs(_mixers(num_layers, attention_layers), "mlp"),
        mamba2=Mamba2Config(
            num_heads=heads,
            head_dim=128,
            state_size=128,
            num_groups=heads,
            num_x_heads=kv_heads,
            num_b_groups=kv_heads,
            chunk_size=256,
        ),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=128,
            rotary_dim=128,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(rope_factor, 1.0, 4.0, 8192),
        )
        if attention_layers
        else None,
        mlp=MlpConfig(mlp),
        **dict(tie_embeddings=False) | options,
    )


def _nemotron_h(
    pattern: str, *, d_model: int, num_heads: int, num_kv_heads: int, **options: Any
) -> Preset:
    """NVIDIA's Nemotron-H and Nemotron-3; `pattern` is `hybrid_override_pattern`."""
    kinds = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
    return _hybrid(
        vocab_size=131072,
        d_model=d_model,
        layers=map(kinds.__getitem__, pattern),
        mamba2=Mamba2Config(
            num_heads=num_heads, head_dim=64, state_size=128, num_groups=8, chunk_size=128
        ),
        attention=AttentionConfig(num_heads=32, num_kv_heads=num_kv_heads, head_dim=128),
        tie_embeddings=False,
        **options,
    )


def _granite_h(
    d_model: int,
    num_layers: int,
    *,
    head_dim: int,
    attention_layers: Collection[int],
    logits_scaling: float,
    **options: Any,
) -> Preset:
    """ibm-granite/granite-4.0-h-350m (dense) and -tiny (experts)."""
    attention_dim = d_model // 12
    mixers = _mixers(num_layers, attention_layers)
    return _hybrid(
        vocab_size=100352,
        d_model=d_model,
        layers=_in_pairs(mixers, "moe" if "moe" in options else "mlp"),
        mamba2=Mamba2Config(num_heads=48, head_dim=head_dim, state_size=128, chunk_size=256),
        attention=AttentionConfig(
            num_heads=12, num_kv_heads=4, head_dim=attention_dim, scale=1 / attention_dim
        ),
        embedding_multiplier=12.0,
        logits_multiplier=1 / logits_scaling,
        **options,
    )


def _zamba2_2_7b() -> Preset:
    """Zyphra/Zamba2-2.7B: its hybrid layers are a shared block before Mamba-2."""
    hybrid = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    layers = (("shared", "mamba2") if layer in hybrid else ("mamba2",) for layer in range(54))
    return _hybrid(
        vocab_size=32000,
        d_model=2560,
        layers=sum(layers, ()),
        mamba2=Mamba2Config(num_heads=80, head_dim=64, state_size=64, chunk_size=256),
        attention=AttentionConfig(
            num_heads=32, num_kv_heads=32, head_dim=160, input_multiple=2, scale=80**-0.5
        ),
        mlp=MlpConfig(10240, activation="gelu"),
        shared=SharedConfig(num_blocks=2, adapter_rank=128),
    )


def _qwen(
    d_model: int,
    num_layers: int,
    *,
    delta_heads: int,
    heads: int,
    kv_heads: int,
    vocab_size: int = 248320,
    **options: Any,
) -> Preset:
    """Qwen's Qwen3.5 (also 3.6 and 3.8 of the same sizes) and Qwen3-Next."""
    mixers = ("gated_delta", "gated_delta", "gated_delta", "attention") * (num_layers // 4)
    return _hybrid(
        vocab_size=vocab_size,
        d_model=d_model,
        layers=_in_pairs(mixers, "moe" if "moe" in options else "mlp"),
        gated_delta=GatedDeltaConfig(
            num_heads=delta_heads, head_dim=128, num_groups=16, state_size=128
        ),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
            qk_norm_eps=1e-6,
            output_gate=True,
        ),
        norm_eps=1e-6,
        norm_float32=True,
        **dict(tie_embeddings=False) | options,
    )


def _qwen_experts(num_experts: int, num_active: int) -> MoeConfig:
    return MoeConfig(num_experts, num_active, 512, shared_size=512, shared_gate=True)


def _lfm2(
    d_model: int, num_layers: int, attention_layers: Collection[int], mlp: int, **options: Any
) -> Preset:
    """Liquid AI's LFM2; the first two layers have an MLP, the others experts if there are any."""
    after = ["moe" if "moe" in options and i >= 2 else "mlp" for i in range(num_layers)]
    mixers = _mixers(num_layers, attention_layers, "short_conv")
    return _hybrid(
        vocab_size=65536,
        d_model=d_model,
        layers=(kind for pair in zip(mixers, after, strict=True) for kind in pair),
        short_conv=ShortConvConfig(d_model),
        attention=AttentionConfig(
            num_heads=d_model // 64,
            num_kv_heads=8,
            head_dim=64,
            rotary_dim=64,
            rope_theta=1e6,
            qk_norm_eps=1e-5,
        ),
        mlp=MlpConfig(mlp),
        **options,
    )


def _lfm3() -> Preset:
    """Liquid AI's LFM3-1.7B: attention with a window of 256 tokens, and with all."""
    full = AttentionConfig(
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        rotary_dim=128,
        rotary_pairs=32,
        rope_theta=1e6,
        qk_norm_eps=1e-5,
        output_gate=True,
        gate_per_head=True,
    )
    local = replace(full, rotary_pairs=None, rope_theta=1e4, window=256)
    mixers = (local, "short_conv", full, "short_conv") * 6
    return _hybrid(
        vocab_size=128000,
        d_model=2048,
        layers=_in_pairs(("short_conv", *mixers[1:]), "mlp"),
        short_conv=ShortConvConfig(2048, conv_width=7),
        mlp=MlpConfig(7680),
        sandwich_norms=True,
    )


def _kda(
    d_model: int,
    num_layers: int,
    latent_layers: Collection[int],
    mlps: tuple[int, int],
    experts: tuple[int, int],
    *,
    heads: int,
    delta: Any,
    latent: Any,
    router: Any,
    **options: Any,
) -> Preset:
    """KDA and latent attention; the first so many layers have an MLP, the others have experts."""
    (num_mlps, size), (num_experts, width) = mlps, experts
    kinds = ["latent_attention" if i in latent_layers else "gated_delta" for i in range(num_layers)]
    after = ["mlp"] * num_mlps + ["moe"] * (num_layers - num_mlps)
    sizes = (heads, 128, heads, 128)
    return _hybrid(
        d_model=d_model,
        layers=(kind for pair in zip(kinds, after, strict=True) for kind in pair),
        gated_delta=GatedDeltaConfig(*sizes, by_channel=True, chunk_size=16, **delta),
        latent_attention=LatentAttentionConfig(heads, 512, 128, 128, 64, **latent),
        mlp=MlpConfig(size),
        moe=MoeConfig(num_experts, 8, width, "sigmoid", shared_size=width, **router),
        tie_embeddings=False,
        **options,
    )


def _ling(
    d_model: int, num_layers: int, group: int, *, query_rank: int | None, **options: Any
) -> Preset:
    """Ling 3 of inclusionAI: each group of layers ends with latent attention."""
    return _kda(
        d_model,
        num_layers,
        range(group - 1, num_layers, group),
        delta=dict(lower_bound=-5.0),
        latent=dict(rope_theta=6e6, query_rank=query_rank, output_gate=True),
        router=dict(scale=2.5, num_router_groups=8, num_active_groups=4),
        vocab_size=157184,
        norm_eps=1e-6,
        **options,
    )


_QWEN_27B = _qwen(5120, 64, mlp=MlpConfig(17408), delta_heads=48, heads=24, kv_heads=4)

PRESETS: dict[str, Preset] = {
    "mamba2-130m": _mamba2(768, 24),
    "mamba2-370m": _mamba2(1024, 48),
    "mamba2-780m": _mamba2(1536, 48),
    "mamba2-1.3b": _mamba2(2048, 48),
    "mamba2-2.7b": _mamba2(2560, 64),
    "MambaInLlama-8B": _mamba_in_llama(
        4096, 32, mlp=14336, inner=4096, attention_layers=range(1, 32, 2)
    ),
    "MambaInLlama-3B": _mamba_in_llama(
        3072,
        28,
        mlp=8192,
        inner=3072,
        attention_layers=range(1, 28, 2),
        rope_factor=32.0,
        tie_embeddings=True,
    ),
    # STree's draft model for both: two Mamba-2 layers.
    "MambaInLlama-draft": _mamba_in_llama(
        1024, 2, mlp=2048, inner=1024, kv_heads=2, tie_embeddings=True
    ),
    "Nemotron-H-8B": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        d_model=4096,
        num_heads=128,
        num_kv_heads=8,
        mlp=MlpConfig(21504, activation="relu2", gated=False),
    ),
    "Nemotron-3-Nano-30B": _nemotron_h(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        d_model=2688,
        num_heads=64,
        num_kv_heads=2,
        moe=MoeConfig(
            num_experts=128,
            num_active=6,
            hidden_size=1856,
            router="sigmoid",
            scale=2.5,
            shared_size=3712,
            activation="relu2",
            gated=False,
        ),
    ),
    "Zamba2-2.7B": _zamba2_2_7b(),
    "Falcon-H1-0.5B": _hybrid(
        vocab_size=32784,
        d_model=1024,
        layers=("parallel", "mlp") * 36,
        mamba2=Mamba2Config(num_heads=24, head_dim=64, state_size=128, norm="none", chunk_size=128),
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=2, head_dim=64, rotary_dim=64, rope_theta=1e11
        ),
        mlp=MlpConfig(2048),
        tie_embeddings=False,
    ),
    "Granite-4-H-350M": _granite_h(
        768,
        32,
        mlp=MlpConfig(2048),
        head_dim=32,
        attention_layers=(10, 13, 17, 27),
        residual_multiplier=0.246,
        logits_scaling=3.0,
    ),
    "Granite-4-H-Tiny": _granite_h(
        1536,
        40,
        head_dim=64,
        attention_layers=(5, 15, 25, 35),
        residual_multiplier=0.22,
        logits_scaling=6.0,
        moe=MoeConfig(num_experts=64, num_active=6, hidden_size=512, shared_size=1024),
    ),
    "Qwen3.5-0.8B": _qwen(
        1024, 24, mlp=MlpConfig(3584), delta_heads=16, heads=8, kv_heads=2, tie_embeddings=True
    ),
    "Qwen3.5-9B": _qwen(4096, 32, mlp=MlpConfig(12288), delta_heads=32, heads=16, kv_heads=4),
    "Qwen3.5-27B": _QWEN_27B,
    "Qwen3.8-27B": _QWEN_27B,
    "Qwen3.5-35B-A3B": _qwen(
        2048, 40, moe=_qwen_experts(256, 8), delta_heads=32, heads=16, kv_heads=2
    ),
    "Qwen3-Next-80B-A3B": _qwen(
        2048,
        48,
        moe=_qwen_experts(512, 10),
        delta_heads=32,
        heads=16,
        kv_heads=2,
        vocab_size=151936,
    ),
    "Kimi-Linear-48B-A3B": _kda(
        *(2304, 27, (3, 7, 11, 15, 19, 23, 26), (1, 9216), (256, 1024)),
        heads=32,
        delta=dict(gate_rank=128, norm_eps=1e-5),
        latent={},
        router=dict(scale=2.446),
        vocab_size=163840,
    ),
    "Ling-3.0-flash": _ling(
        *(2560, 42, 6), heads=32, mlps=(2, 6144), experts=(512, 768), query_rank=None
    ),
    "Ling-3.0-tiny": _ling(
        *(1536, 24, 4), heads=16, mlps=(1, 4608), experts=(128, 512), query_rank=256
    ),
    "LFM2-350M": _lfm2(1024, 16, (2, 5, 8, 10, 12, 14), 4608),
    "LFM2-1.2B": _lfm2(2048, 16, (2, 5, 8, 10, 12, 14), 8192),
    "LFM2-2.6B": _lfm2(2048, 30, (2, 5, 9, 13, 17, 21, 24, 27), 10752),
    "LFM2-8B-A1B": _lfm2(
        2048,
        24,
        (2, 6, 10, 14, 18, 21),
        7168,
        moe=MoeConfig(
            num_experts=32, num_active=4, hidden_size=1792, router="sigmoid", norm_eps=1e-6
        ),
    ),
    "LFM3-1.7B": _lfm3(),
}
