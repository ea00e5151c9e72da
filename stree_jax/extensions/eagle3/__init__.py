"""EAGLE-3 heads (Li et al., 2025, arXiv:2503.01840): drafts from inner states of the target.

`conversion` is imported when it is used.
"""

from typing import Any

from stree_jax import HybridLM, load_head
from stree_jax.extensions.eagle3.drafter import Eagle3Drafter, Eagle3Model
from stree_jax.extensions.eagle3.head import Eagle3Config, Eagle3Head
from stree_jax.heads import HeadKind
from stree_jax.models import build_config

__all__ = ["KIND", "Eagle3Config", "Eagle3Drafter", "Eagle3Head", "Eagle3Model", "load_eagle3"]

KIND = HeadKind(
    head=Eagle3Head,
    written=Eagle3Head.written,
    config=lambda header: build_config(Eagle3Config, header.get("head")),
    new=Eagle3Head.for_target,
    drafts=Eagle3Model,
    missing="is not an EAGLE-3 head; it is a native checkpoint of something else",
    misfit="EAGLE-3 head in {path} is for another target; load the target that it was trained for",
)


def load_eagle3(path: Any, target: HybridLM | Any, **options: Any) -> Eagle3Head:
    """Loads an EAGLE-3 head, with the options of `load_head`.

    In other programs' files it has architectures such as `LlamaForCausalLMEagle3`, and tensors
    `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`.
    """
    return load_head("eagle3", path, target, **options)
