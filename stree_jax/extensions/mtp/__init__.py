"""Multi-token-prediction heads: drafts by a small head on the target's own hidden states.

`training` and `conversion` are imported when they are used.
"""

from typing import Any

from stree_jax import HybridLM, load_head
from stree_jax import save_head as save_mtp
from stree_jax.extensions.mtp.drafter import MtpDrafter, MtpModel
from stree_jax.extensions.mtp.head import MtpConfig, MtpHead
from stree_jax.heads import HeadKind
from stree_jax.models import build_config

__all__ = ["KIND", "MtpConfig", "MtpDrafter", "MtpHead", "MtpModel", "load_mtp", "save_mtp"]

_TRAIN = "stree-jax train-mtp RECIPE TARGET OUTPUT"
KIND = HeadKind(
    head=MtpHead,
    written=MtpHead.written,
    config=lambda header: build_config(MtpConfig, header.get("head")),
    new=MtpHead.for_target,
    drafts=MtpModel,
    missing="has no multi-token prediction head in a folder mtp; convert the original again if it"
    f" has one, or train one: {_TRAIN}",
    misfit="multi-token-prediction head in {path} is for another target; load that one, or train a"
    f" head for this one: {_TRAIN}",
)


def load_mtp(path: Any, target: HybridLM | Any, **options: Any) -> MtpHead:
    """Loads a multi-token-prediction head, with the options of `load_head`.

    Also from a checkpoint of Nemotron-3, Qwen or Ling 3 with its head, or a native one whose folder
    `mtp` has it.
    """
    return load_head("mtp", path, target, **options)
