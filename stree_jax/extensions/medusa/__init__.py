"""Medusa heads (Cai et al., 2024, arXiv:2401.10774): drafts from the target's own hidden state.

`training` is imported when it is used.
"""

from typing import Any

from flax import nnx

from stree_jax import HybridLM, load_head
from stree_jax import save_head as save_medusa
from stree_jax.checks import check_int
from stree_jax.extensions.medusa.drafter import MedusaDrafter
from stree_jax.extensions.medusa.head import MAX_HEADS, MedusaHeads
from stree_jax.heads import HeadKind

__all__ = ["KIND", "MedusaDrafter", "MedusaHeads", "load_medusa", "save_medusa"]


KIND = HeadKind(
    head=MedusaHeads,
    written=lambda heads: {"num_heads": heads.num_heads},
    config=lambda header: check_int("num_heads", header.get("num_heads"), 1, MAX_HEADS),
    new=lambda number, target: MedusaHeads(target, num_heads=number, rngs=nnx.Rngs(0)),
    drafts=MedusaDrafter,
    missing="has no Medusa heads; it is a model, for from_pretrained",
    misfit="Medusa heads in {path} were trained with another target; load that one, or train heads"
    " for this one: stree-jax medusa RECIPE TARGET OUTPUT",
    is_published=False,
)


def load_medusa(path: Any, target: HybridLM | Any, **options: Any) -> MedusaHeads:
    """Loads Medusa heads, with the options of `load_head`."""
    return load_head("medusa", path, target, **options)
