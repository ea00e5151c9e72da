"""Named shapes of real models that benchmarks and tests share."""

from typing import NamedTuple


class MixerShape(NamedTuple):
    """One SSD layer as the tree kernels see it."""

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
