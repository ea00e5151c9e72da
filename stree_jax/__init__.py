"""Speculative tree decoding of Mamba-2 and hybrid language models in JAX.

import stree_jax as st

model = st.from_pretrained(st.demo_path("target"))
drafter = st.ModelDrafter(st.from_pretrained(st.demo_path("draft")))
out = st.generate(model, [[1, 2, 3]], drafter=drafter)
"""

from stree_jax.checkpoint import save_pretrained
from stree_jax.config import ModelConfig
from stree_jax.decoding.beam import BeamDrafter
from stree_jax.decoding.draft import Drafter, ModelDrafter, NgramDrafter
from stree_jax.decoding.generate import PAD, DecodeStatistics, Generation, generate, stream
from stree_jax.layer_config import Mamba2Config
from stree_jax.models.lm import HybridLM
from stree_jax.pretrained import demo_path, from_pretrained, load_tokenizer
from stree_jax.tree import Tree, TreeTopology

__all__ = [
    "PAD",
    "BeamDrafter",
    "DecodeStatistics",
    "Drafter",
    "Generation",
    "HybridLM",
    "Mamba2Config",
    "ModelConfig",
    "ModelDrafter",
    "NgramDrafter",
    "Tree",
    "TreeTopology",
    "demo_path",
    "from_pretrained",
    "generate",
    "load_tokenizer",
    "save_pretrained",
    "stream",
]
__version__ = "0.1.0"
