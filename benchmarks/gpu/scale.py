"""The sizes of a GPU session: real ones, and tiny ones that run on any device."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import stree_jax as st
from benchmarks import lossless
from benchmarks.cases import CASES
from benchmarks.cases.checks import UNROLLED
from benchmarks.shapes import ATTENTIONS, EXPERTS, MIXERS, AttentionShape, ExpertShape, MixerShape

TINY = {
    MixerShape: {"tiny": MixerShape(2, 16, 16, 1)},
    AttentionShape: {"tiny": AttentionShape(4, 2, 16)},
    ExpertShape: {"tiny": ExpertShape(32, 16, 4, 2, True)},
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of all sections.

    Attributes:
        implementations: compared implementations, the kernels last.
        interpret: the kernels run in the interpreter.
        dtype: dtype of operands and weights.
        shapes: shapes on which kernels are checked, by type and name.
        gated: name of the shape that every kernel is checked on first, by type.
        cases: kernels that are checked on all shapes, and timed.
        capacity: positions of the KV cache.
        repeats: number of calls that must agree bit by bit.
        checked_nodes, checked_dtypes: sizes of trees, and dtypes, on which kernels are checked.
        timed: names of shapes, numbers of nodes and batch sizes for timing kernels.
        mamba2, hybrid: models whose steps are timed.
        step_nodes: sizes of trees, the most important first.
        batches, batch_nodes: batch sizes, and sizes of trees for them.
        families, trees, tokens: models, trees and length of text for the check of losslessness.
        pair: configs of a target and a draft with random weights.
        beams, beam_steps: sizes of the beam trees of table 1.
        count, steps, rounds: calls of a kernel and steps in a timed program; runs of a program.
        copied: number of bytes to copy for the bandwidth.
    """

    implementations: tuple[str, ...]
    interpret: bool
    dtype: str
    shapes: Mapping[type, Mapping[str, Any]]
    gated: Mapping[type, str]
    cases: tuple[str, ...]
    capacity: int
    repeats: int
    checked_nodes: tuple[int, ...]
    checked_dtypes: tuple[str, ...]
    timed: Mapping[str, Sequence[Any]]
    mamba2: st.ModelConfig
    hybrid: st.ModelConfig
    step_nodes: tuple[int, ...]
    batches: tuple[int, ...]
    batch_nodes: tuple[int, ...]
    families: tuple[str, ...]
    trees: tuple[str, ...]
    tokens: int
    pair: tuple[st.ModelConfig, st.ModelConfig]
    beams: tuple[int, ...]
    beam_steps: tuple[int, ...]
    count: int
    steps: int
    rounds: int
    copied: int


_ATTENTIONS = ("MambaInLlama-8B", "Falcon-H1-0.5B", "Granite-4-H-Tiny", "Nemotron-3-Nano-30B")
FULL = Scale(
    implementations=("xla", "pallas"),
    interpret=False,
    dtype="bfloat16",
    shapes={
        MixerShape: MIXERS,
        AttentionShape: {name: ATTENTIONS[name] for name in _ATTENTIONS},
        ExpertShape: EXPERTS,
    },
    gated={
        MixerShape: "mamba2-2.7b",
        AttentionShape: "MambaInLlama-8B",
        ExpertShape: "Granite-4-H-Tiny",
    },
    cases=tuple(CASES),
    capacity=4096,
    repeats=50,
    checked_nodes=(64, 1, 13, 100),
    checked_dtypes=("bfloat16", "float32"),
    timed={
        "shapes": ("mamba2-2.7b", "MambaInLlama-8B", "Nemotron-3-Nano-30B"),
        "nodes": (64, 1, 16),
        "batches": (1, 32, 8),
    },
    mamba2=st.ModelConfig.preset("mamba2-2.7b"),
    hybrid=st.ModelConfig.preset("MambaInLlama-8B"),
    step_nodes=(1, 63, 5, 15, 31, 2, 8, 48),
    batches=(1, 32, 8, 2, 4, 16),
    batch_nodes=(1, 63),
    families=tuple(lossless.FAMILIES),
    trees=("random tree of 32", "chain of 4", "tree A"),
    tokens=48,
    pair=(st.ModelConfig.preset("mamba2-2.7b"), st.ModelConfig.preset("mamba2-130m")),
    beams=(4, 2, 5, 3),
    beam_steps=(16, 8, 4),
    count=1 + 6 * UNROLLED,
    steps=20,
    rounds=10,
    copied=1 << 30,
)
_TINY = st.ModelConfig.tiny(num_layers=1, head_dim=16, state_size=16, tie_embeddings=False)
_TINY_HYBRID = dataclasses.replace(
    lossless.FAMILIES["MambaInLlama"], layers=("mamba2", "attention"), mlp=None
)
SMOKE = Scale(
    implementations=("xla", "pallas_interpret"),
    interpret=True,
    dtype="bfloat16",
    shapes=TINY,
    gated=dict.fromkeys(TINY, "tiny"),
    cases=("replay_tree_scan", "tree_attention_layer", "add_rms_norm"),
    capacity=40,
    repeats=5,
    checked_nodes=(5,),
    checked_dtypes=("float32",),
    timed={"shapes": ("tiny",), "nodes": (3,), "batches": (2,)},
    mamba2=_TINY,
    hybrid=_TINY_HYBRID,
    step_nodes=(1, 5),
    batches=(2,),
    batch_nodes=(3,),
    families=("MambaInLlama",),
    trees=("chain of 4",),
    tokens=8,
    pair=(_TINY, _TINY),
    beams=(2,),
    beam_steps=(2,),
    count=2,
    steps=2,
    rounds=2,
    copied=1 << 20,
)
