"""The older path of `stree_jax.extensions.reasoning`."""

from stree_jax.extensions.reasoning import *  # noqa: F403
from stree_jax.extensions.reasoning import __all__ as __all__
