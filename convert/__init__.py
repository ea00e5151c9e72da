"""Converters between checkpoint formats. Shipped as `stree_jax.convert`; needs no torch.

    families       the table `FAMILIES`: recognising, reading and writing each family
    description    the input and result of a family's reader: `Source`, `Description`
    pure, bamba, granite, nemotron_h, zamba2, mamba_in_llama    configs of the families
    eagle3         EAGLE-3 heads, which are separate checkpoints
    mtp            the multi-token prediction head beside a Nemotron-3 target
    fields         config files, with every field accounted for
    rules, tables  maps from tensors to weights
    files, tensors, torch_file    lazily opened weights
    reading, writing, api         to a `HybridLM` and back; `convert`

A new family is a module with a reader (and a writer), and one entry of `FAMILIES`.
"""

from stree_jax.convert.api import convert, find, formats
from stree_jax.convert.description import Description, Source
from stree_jax.convert.eagle3 import load_eagle3_head
from stree_jax.convert.families import FAMILIES, QUIRKS, Family, has_field
from stree_jax.convert.reading import (
    Checkpoint,
    is_foreign,
    load_model,
    load_mtp_head,
    open_checkpoint,
)

__all__ = [
    "FAMILIES",
    "QUIRKS",
    "Checkpoint",
    "Description",
    "Family",
    "Source",
    "convert",
    "find",
    "formats",
    "has_field",
    "is_foreign",
    "load_eagle3_head",
    "load_model",
    "load_mtp_head",
    "open_checkpoint",
]
