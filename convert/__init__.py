"""Converters between checkpoint formats. Shipped as `stree_jax.convert`; needs no torch.

`tensors` and `torch_file` open files lazily; `rules` and `families` are the tables: which tensor is
which weight, and what a config means; `reading` and `writing` go to a `HybridLM` and back.
"""

from stree_jax.convert.api import convert, find, is_native
from stree_jax.convert.reading import Checkpoint, load_model, open_checkpoint

__all__ = ["Checkpoint", "convert", "find", "is_native", "load_model", "open_checkpoint"]
