"""DFlash and DSpark heads: a block of drafts in one pass (arXiv:2602.06036, arXiv:2607.05147).

`training` and `conversion` are imported when they are used.
"""

from typing import Any

from stree_jax import HybridLM, load_head
from stree_jax.extensions.dflash.drafter import DFlashDrafter, DFlashModel
from stree_jax.extensions.dflash.head import DFlashConfig, DFlashHead
from stree_jax.heads import HeadKind
from stree_jax.models import build_config

__all__ = ["KIND", "DFlashConfig", "DFlashDrafter", "DFlashHead", "DFlashModel", "load_dflash"]

KIND = HeadKind(
    head=DFlashHead,
    written=DFlashHead.written,
    config=lambda header: build_config(DFlashConfig, header.get("head")),
    new=DFlashHead.for_target,
    drafts=DFlashModel,
    missing="is not a DFlash head; it is a native checkpoint of something else",
    misfit="DFlash head in {path} is for another target; load that one, or train a head for this"
    " one: stree-jax train-dflash RECIPE TARGET OUTPUT",
)


def load_dflash(path: Any, target: HybridLM | Any, **options: Any) -> DFlashHead:
    """Loads a DFlash or DSpark head, with the options of `load_head`.

    In other programs' files its architecture is `DFlashDraftModel`, `DFlash2DraftModel`,
    `Qwen3DSparkModel` or `DSparkDraftModel`.
    """
    return load_head("dflash", path, target, **options)
