"""Rollouts of Google's Tunix by trees: reinforcement learning of Mamba-2 and hybrid models.

`pip install '.[tunix]'`. Tunix is imported when `TreeRollout` is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from stree_jax.extensions.tunix.policy import Policy

__all__ = ["Policy", "TreeRollout"]

if TYPE_CHECKING:
    from stree_jax.extensions.tunix.rollout import TreeRollout
else:

    def __getattr__(name: str) -> Any:
        if name != "TreeRollout":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.rollout").TreeRollout
