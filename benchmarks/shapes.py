"""Shapes of real models by name, shared by benchmarks and tests."""

from typing import NamedTuple


class MixerShape(NamedTuple):
    """A Mamba-2 layer without its projections."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int


MIXERS = {
    "mamba2-130m": MixerShape(24, 64, 128, 1),
    "mamba2-2.7b": MixerShape(80, 64, 128, 1),
    "MambaInLlama-8B": MixerShape(32, 128, 128, 32),
    "Nemotron-H-8B": MixerShape(128, 64, 128, 8),
    "Falcon-H1-1.5B": MixerShape(48, 64, 256, 1),
}


class AttentionShape(NamedTuple):
    """An attention layer without its projections."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


ATTENTIONS = {
    "MambaInLlama-8B": AttentionShape(32, 8, 128),
    "Falcon-H1-0.5B": AttentionShape(8, 2, 64),
    "Granite-4-H-350M": AttentionShape(12, 4, 64),
    "Granite-4-H-Tiny": AttentionShape(12, 4, 128),
    "Nemotron-3-Nano-30B": AttentionShape(32, 2, 128),
    "Zamba2-2.7B": AttentionShape(32, 32, 160),
    "Zamba2-7B": AttentionShape(32, 32, 224),
}


class ExpertShape(NamedTuple):
    """The experts of a mixture-of-experts layer."""

    width: int
    hidden_size: int
    num_experts: int
    num_active: int
    gated: bool


EXPERTS = {
    "Granite-4-H-Tiny": ExpertShape(1536, 512, 64, 6, True),
    "Nemotron-3-Nano-30B": ExpertShape(2688, 1856, 128, 6, False),
}
