"""Converters between checkpoint formats. Shipped as `stree_jax.convert`; needs no torch.

`tensors` and `torch_file` open files lazily; `fields` accounts for every field of a config; `pure`,
`bamba`, `granite`, `nemotron_h`, `zamba2` and `mamba_in_llama` say what a family's config means,
`tables` which tensor is which weight, `rules` how one becomes the other; `families` recognises and
picks; `reading` and `writing` go to a `HybridLM` and back.
"""

from stree_jax.convert.api import FORMATS, convert, find, is_native
from stree_jax.convert.families import QUIRKS
from stree_jax.convert.reading import Checkpoint, load_model, open_checkpoint

__all__ = [
    "FORMATS",
    "QUIRKS",
    "Checkpoint",
    "convert",
    "find",
    "is_native",
    "load_model",
    "open_checkpoint",
]
