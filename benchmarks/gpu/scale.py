"""The sizes of a GPU session: real ones, and tiny ones that run on any device."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import stree_jax as st
from benchmarks import lossless
from benchmarks.gpu import byte_pair
from benchmarks.shapes import (
    ATTENTIONS,
    EXPERTS,
    MIXERS,
    AttentionShape,
    ExpertShape,
    MixerShape,
)
from stree_jax.training.recipe import Training

TINY = {
    MixerShape: {"tiny": MixerShape(2, 16, 16, 1)},
    AttentionShape: {"tiny": AttentionShape(4, 2, 16)},
    ExpertShape: {"tiny": ExpertShape(32, 16, 4, 2, True)},
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything is done.

    Attributes:
        implementations: to compare, the kernels last.
        shapes: to check kernels on, by their type and name.
        capacity: of the KV cache.
        checked_nodes: sizes of trees to check kernels on.
        families, trees, tokens: to check losslessness on.
        timed: names of shapes, numbers of nodes and batch sizes to time kernels on.
        mamba2, hybrid: models whose steps are timed.
        dtype: of their weights.
        step_nodes: sizes of trees, the most important first.
        pair: target and draft with random weights.
        beams, beam_steps: of table 1.
        count, rounds: calls in a timed program, and timed programs.
        training: target, draft and optimisation.
        copied: bytes to copy for the bandwidth.
    """

    implementations: tuple[str, ...]
    shapes: Mapping[type, Mapping[str, Any]]
    capacity: int
    checked_nodes: tuple[int, ...]
    families: tuple[str, ...]
    trees: tuple[str, ...]
    tokens: int
    timed: Mapping[str, Sequence[Any]]
    mamba2: st.ModelConfig
    hybrid: st.ModelConfig
    dtype: str
    step_nodes: tuple[int, ...]
    pair: tuple[st.ModelConfig, st.ModelConfig]
    beams: tuple[int, ...]
    beam_steps: tuple[int, ...]
    count: int
    rounds: int
    training: tuple[st.ModelConfig, st.ModelConfig, Training]
    copied: int


FULL = Scale(
    implementations=("xla", "pallas"),
    shapes={
        MixerShape: MIXERS,
        AttentionShape: {
            name: ATTENTIONS[name]
            for name in (
                *("MambaInLlama-8B", "Falcon-H1-0.5B"),
                *("Granite-4-H-Tiny", "Nemotron-3-Nano-30B"),
            )
        },
        ExpertShape: EXPERTS,
    },
    capacity=4096,
    checked_nodes=(64, 13, 1, 100),
    families=tuple(lossless.FAMILIES),
    trees=("random tree of 32", "chain of 4", "tree A"),
    tokens=48,
    timed={
        "shapes": ("mamba2-2.7b", "MambaInLlama-8B", "Nemotron-3-Nano-30B"),
        "nodes": (64, 16),
        "batches": (1, 64),
    },
    mamba2=st.ModelConfig.preset("mamba2-2.7b"),
    hybrid=st.ModelConfig.preset("MambaInLlama-8B"),
    dtype="bfloat16",
    step_nodes=(1, 63, 5, 15, 31, 2, 8, 48),
    pair=(st.ModelConfig.preset("mamba2-2.7b"), st.ModelConfig.preset("mamba2-130m")),
    beams=(4, 2, 5, 3),
    beam_steps=(16, 8, 4),
    count=10,
    rounds=10,
    training=(byte_pair.TARGET, byte_pair.DRAFT, byte_pair.TRAINING),
    copied=1 << 30,
)
_TINY = st.ModelConfig.tiny(num_layers=1, head_dim=16, state_size=16, tie_embeddings=False)
_TINY_HYBRID = dataclasses.replace(
    lossless.FAMILIES["MambaInLlama"], layers=("mamba2", "attention"), mlp=None
)
_TINY_BYTES = st.ModelConfig.tiny(vocab_size=256, num_layers=1)
SMOKE = Scale(
    implementations=("xla", "pallas_interpret"),
    shapes=TINY,
    capacity=40,
    checked_nodes=(5,),
    families=("MambaInLlama",),
    trees=("chain of 4",),
    tokens=8,
    timed={"shapes": ("tiny",), "nodes": (3,), "batches": (2,)},
    mamba2=_TINY,
    hybrid=_TINY_HYBRID,
    dtype="bfloat16",
    step_nodes=(1, 5, 7),
    pair=(_TINY, _TINY),
    beams=(2,),
    beam_steps=(2,),
    count=2,
    rounds=2,
    training=(
        _TINY_BYTES,
        _TINY_BYTES,
        Training(steps=10**9, batch_size=2, sequence_length=16, warmup_steps=2),
    ),
    copied=1 << 20,
)
