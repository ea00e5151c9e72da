"""Drafting with an EAGLE-3 head, and loading one."""

import os
from collections.abc import Collection
from typing import Any

from stree_jax import HybridLM, ModelDrafter
from stree_jax.extensions.eagle3.model import Eagle3Model
from stree_jax.messages import shown
from stree_jax.models import Eagle3Head, check_on_one_device, loaded_for


class Eagle3Drafter(ModelDrafter):
    """An EAGLE-3 head that fills a static tree level by level, as `MtpDrafter` does.

    Args:
        target: the model that `generate` decodes with, on one device.
        head: a head for that model, see `load_eagle3`.
        child_sampling: see `ModelDrafter`.

    Raises:
        ValueError: another value of `child_sampling`, or a head of other sizes.
    """

    def __init__(self, target: HybridLM, head: Eagle3Head, *, child_sampling: str = "auto"):
        super().__init__(Eagle3Model(target, head), child_sampling=child_sampling)


def load_eagle3(
    path: str | os.PathLike[str], target: HybridLM, *, ignore: Collection[str] | Any = ()
) -> Eagle3Head:
    """Loads an EAGLE-3 head, in the target's dtype.

    Args:
        path: directory of the head, or the name of one on the hub: config.json with architectures
            such as `LlamaForCausalLMEagle3`, and tensors `midlayer.*`, `fc`, `norm`, `lm_head`,
            `d2t`.
        target: the model that it is for, on one device.
        ignore: names of unknown config fields to ignore, see `from_pretrained`.

    Raises:
        ValueError: the checkpoint is missing, damaged, not an EAGLE-3 head, unsupported, or of a
            model of another size.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path must be a directory or the name of a model on the hub, got {shown(path)}"
        )
    check_on_one_device(target, "load_eagle3")
    from stree_jax.convert import find, load_eagle3_head  # takes time to import

    return loaded_for(target, load_eagle3_head(find(path), target, ignore))
