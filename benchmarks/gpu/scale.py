"""The sizes of a GPU session: real ones, and tiny ones that run on any device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
_ATTENTIONS = ("MambaInLlama-8B", "Falcon-H1-0.5B", "Granite-4-H-Tiny", "Nemotron-3-Nano-30B")


class Scale(NamedTuple):
    """Sizes of all sections; by default those of a session on a GPU."""

    implementations: tuple[str, ...] = ("xla", "pallas")  # the kernels last
    dtype: str = "bfloat16"  # of operands and weights
    # Shapes on which kernels are checked, and the one on which every kernel is checked first.
    shapes: Mapping[type, Mapping[str, Any]] = {
        MixerShape: MIXERS,
        AttentionShape: {name: ATTENTIONS[name] for name in _ATTENTIONS},
        ExpertShape: EXPERTS,
    }
    gated: Mapping[type, str] = {
        MixerShape: "mamba2-2.7b",
        AttentionShape: "MambaInLlama-8B",
        ExpertShape: "Granite-4-H-Tiny",
    }
    cases: tuple[str, ...] = tuple(CASES)  # kernels that are checked on all shapes, and timed
    capacity: int = 4096  # positions of the KV cache
    repeats: int = 50  # calls that must agree bit by bit
    checked_nodes: tuple[int, ...] = (64, 1, 13, 100)
    checked_dtypes: tuple[str, ...] = ("bfloat16", "float32")
    # Kernels are timed on all combinations of these.
    timed_shapes: tuple[str, ...] = ("mamba2-2.7b", "MambaInLlama-8B", "Nemotron-3-Nano-30B")
    timed_nodes: tuple[int, ...] = (64, 1, 16)
    timed_batches: tuple[int, ...] = (1, 32, 8)
    # Models whose steps are timed; the most important sizes come first.
    mamba2: st.ModelConfig = st.ModelConfig.preset("mamba2-2.7b")
    hybrid: st.ModelConfig = st.ModelConfig.preset("MambaInLlama-8B")
    step_nodes: tuple[int, ...] = (1, 63, 5, 15, 31, 2, 8, 48)
    batches: tuple[int, ...] = (1, 32, 8, 2, 4, 16)
    batch_nodes: tuple[int, ...] = (1, 63)
    # Texts that must be those of autoregressive decoding.
    families: tuple[str, ...] = tuple(lossless.FAMILIES)
    trees: tuple[str, ...] = ("random tree of 32", "chain of 4", "tree A")
    tokens: int = 48
    # Table 1: configs of a target and a draft with random weights, and sizes of beam trees.
    pair: tuple[st.ModelConfig, st.ModelConfig] = (mamba2, st.ModelConfig.preset("mamba2-130m"))
    beams: tuple[int, ...] = (4, 2, 5, 3)
    beam_steps: tuple[int, ...] = (16, 8, 4)
    count: int = 1 + 6 * UNROLLED  # calls of a kernel in a timed program
    steps: int = 20  # of a model in a timed program
    rounds: int = 10  # runs of a program
    copied: int = 1 << 30  # bytes, for the bandwidth


FULL = Scale()
_TINY = st.ModelConfig.tiny(num_layers=1, head_dim=16, state_size=16, tie_embeddings=False)
_TINY_HYBRID = lossless.FAMILIES["MambaInLlama"].with_layers(("mamba2", "attention"))
SMOKE = Scale(
    implementations=("xla", "pallas_interpret"),
    shapes=TINY,
    gated=dict.fromkeys(TINY, "tiny"),
    cases=("replay_tree_scan", "tree_attention_layer", "add_rms_norm"),
    capacity=40,
    repeats=5,
    checked_nodes=(5,),
    checked_dtypes=("float32",),
    timed_shapes=("tiny",),
    timed_nodes=(3,),
    timed_batches=(2,),
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


def scale_of(options: Mapping[str, Any]) -> Scale:
    """The sizes of a run with these options."""
    return SMOKE if options["smoke"] else FULL
