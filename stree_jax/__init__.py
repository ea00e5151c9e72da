"""Speculative tree decoding of Mamba-2 and hybrid language models in JAX.

import stree_jax as st

model = st.from_pretrained(st.demo_path("target"))
drafter = st.ModelDrafter(st.load_draft(st.demo_path("draft"), model))
out = st.generate(model, [[1, 2, 3]], drafter=drafter)
"""

import importlib
from typing import Any

from stree_jax.checkout import find_convert
from stree_jax.checkpoint import save_pretrained
from stree_jax.compilation_cache import enable_compilation_cache
from stree_jax.decoding.drafters import (
    BeamDrafter,
    Drafter,
    DynamicDrafter,
    ModelDrafter,
    NgramDrafter,
    root_only,
)
from stree_jax.decoding.filters import Filter, MinP, TopK, TopP
from stree_jax.decoding.generate import generate, stream
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import Options
from stree_jax.decoding.prefix.prefix import Prefix
from stree_jax.decoding.processors import LogitsProcessor
from stree_jax.decoding.results import (
    PAD,
    DecodeStatistics,
    Generation,
    NonFiniteLogitsError,
    Piece,
)
from stree_jax.decoding.rules import Rule, stateless
from stree_jax.decoding.sampling import sample_tokens, token_log_probs
from stree_jax.decoding.score import score, text_log_probs
from stree_jax.decoding.text_stream import TextStream
from stree_jax.decoding.token_rules import (
    AllowedTokens,
    BannedTokens,
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
)
from stree_jax.decoding.tree_choice import TreeChoice
from stree_jax.decoding.types import (
    Context,
    DecodeState,
    DraftTree,
    Drawn,
    Limits,
    Sampling,
    Step,
    Verdict,
)
from stree_jax.decoding.verifiers import VERIFIERS, Verifier, follow
from stree_jax.decoding.way import Way
from stree_jax.heads import HEADS, save_head
from stree_jax.measuring import BenchReport, bench
from stree_jax.mesh.partition import make_mesh
from stree_jax.mesh.weights import shard
from stree_jax.models import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    ParallelConfig,
    RopeScaling,
    SharedConfig,
    ShortConvConfig,
)
from stree_jax.models.config import ModelConfig
from stree_jax.models.lm import HybridLM
from stree_jax.pretrained import demo_path, from_pretrained, load_draft, load_head, load_tokenizer
from stree_jax.serving import Completion, Event, PrefixCacheStats, Request, Scheduler
from stree_jax.text import complete
from stree_jax.tree import Tree, TreeTopology
from stree_jax.tuning import TuningReport, tune

# Names that are imported when they are first used, and the module that has or is each.
_LATER = {
    **{name: f"stree_jax.{name}" for name in ("convert", "testing", "training")},
    "reasoning": "stree_jax.extensions.reasoning",
    **dict.fromkeys(("Automaton", "json_schema", "regex"), "stree_jax.extensions.grammar"),
    "InterleavedDrafter": "stree_jax.extensions.hierarchical",
    **{name: room.module for room in HEADS.values() for name in room.names},
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = module if _LATER[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value  # the next access bypasses this function
    return value


__all__ = [
    "PAD",
    "VERIFIERS",
    "AllowedTokens",
    "AttentionConfig",
    "BannedTokens",
    "BeamDrafter",
    "BenchReport",
    "Completion",
    "Context",
    "DecodeState",
    "DecodeStatistics",
    "DraftTree",
    "Drafter",
    "Drawn",
    "DynamicDrafter",
    "Event",
    "Filter",
    "FrequencyPenalty",
    "GatedDeltaConfig",
    "Generation",
    "HybridLM",
    "LatentAttentionConfig",
    "LayerConfig",
    "Limits",
    "LogitBias",
    "LogitsProcessor",
    "Mamba2Config",
    "MinP",
    "MlpConfig",
    "ModelConfig",
    "ModelDrafter",
    "MoeConfig",
    "NgramDrafter",
    "NonFiniteLogitsError",
    "Options",
    "ParallelConfig",
    "Piece",
    "Prefix",
    "PrefixCacheStats",
    "PresencePenalty",
    "RepetitionPenalty",
    "Request",
    "RopeScaling",
    "Rule",
    "Sampling",
    "Scheduler",
    "SharedConfig",
    "ShortConvConfig",
    "SpeculativeDecoder",
    "Step",
    "TextStream",
    "TopK",
    "TopP",
    "Tree",
    "TreeChoice",
    "TreeTopology",
    "TuningReport",
    "Verdict",
    "Verifier",
    "Way",
    "bench",
    "complete",
    "demo_path",
    "enable_compilation_cache",
    "follow",
    "from_pretrained",
    "generate",
    "load_draft",
    "load_head",
    "load_tokenizer",
    "make_mesh",
    "root_only",
    "sample_tokens",
    "save_head",
    "save_pretrained",
    "score",
    "shard",
    "stateless",
    "stream",
    "text_log_probs",
    "token_log_probs",
    "tune",
    *_LATER,
]
__version__ = "0.1.0"
find_convert()


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
