"""Medusa heads (Cai et al., 2024, arXiv:2401.10774): drafts from the target's own hidden state.

`stree_jax.extensions.medusa.training` trains them; it is not imported here, to keep this light.
"""

from stree_jax.extensions.medusa.checkpoint import load_medusa, save_medusa
from stree_jax.extensions.medusa.drafter import MedusaDrafter
from stree_jax.extensions.medusa.heads import MedusaHeads
from stree_jax.extensions.medusa.typical import Typical

__all__ = ["MedusaDrafter", "MedusaHeads", "Typical", "load_medusa", "save_medusa"]
