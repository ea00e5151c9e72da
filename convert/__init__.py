"""Converters between checkpoint formats. Shipped as `stree_jax.convert`; needs no torch.

    families       the table `FAMILIES`: recognising, reading and writing each family
    description    the input and result of a family's reader: `Source`, `Description`
    pure, bamba, granite, nemotron_h, zamba2, mamba_in_llama, qwen, lfm2    the families
    fields         config files, with every field accounted for
    rules, tables  maps from tensors to weights
    files, torch_file, quantised    lazily opened weights
    gguf_file, gguf               llama.cpp's files, and what its converter did to a checkpoint
    adapter        LoRA adapters, merged into them
    finding        a checkpoint here or on the hub
    reading, writing, api         to a `HybridLM` and back; `convert`

A new family is a module with a reader (and a writer), and one entry of `FAMILIES`. The kinds of
heads in `stree_jax.extensions` read theirs with these parts.
"""

from stree_jax.convert.api import convert, formats
from stree_jax.convert.description import Description, HeadDescription, Source
from stree_jax.convert.families import FAMILIES, QUIRKS, Family, has_field
from stree_jax.convert.fields import TRANSFORMERS, Fields
from stree_jax.convert.finding import find
from stree_jax.convert.hybrid_parts import llama_parts, rope_values
from stree_jax.convert.qwen import layer_rules as qwen_layer_rules
from stree_jax.convert.reading import (
    Checkpoint,
    head_rules,
    is_foreign,
    load_head_weights,
    load_model,
    open_checkpoint,
    read_head,
    read_tensor,
)
from stree_jax.convert.rules import AS_IS, PLUS_ONE, TRANSPOSED, Rule, Transform
from stree_jax.convert.tables import hf_attention, nemotron_experts, split_mlp, within
from stree_jax.convert.writing import write_weights

__all__ = [
    "AS_IS",
    "FAMILIES",
    "PLUS_ONE",
    "QUIRKS",
    "TRANSFORMERS",
    "TRANSPOSED",
    "Checkpoint",
    "Description",
    "Family",
    "Fields",
    "HeadDescription",
    "Rule",
    "Source",
    "Transform",
    "convert",
    "find",
    "formats",
    "has_field",
    "head_rules",
    "hf_attention",
    "is_foreign",
    "llama_parts",
    "load_head_weights",
    "load_model",
    "nemotron_experts",
    "open_checkpoint",
    "qwen_layer_rules",
    "read_head",
    "read_tensor",
    "rope_values",
    "split_mlp",
    "within",
    "write_weights",
]
