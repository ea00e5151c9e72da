"""Block sizes of the `attention_tree` kernel.

Defaults are those of `tree_attention`, with which this does not spill either; a device's own come
from its table (`pallas_kernels/tuned.py`).
"""

from jax.typing import DTypeLike

from pallas_kernels.tree_attention import config as tree_attention
from pallas_kernels.tree_attention.config import DEFAULTS, BlockSizes

__all__ = ["DEFAULTS", "BlockSizes", "block_sizes"]


def block_sizes(dtype: DTypeLike, **sizes: int) -> BlockSizes:
    """Block sizes for inputs of this type; arguments as those of `tree_attention`'s."""
    return tree_attention.block_sizes(dtype, **sizes, op="attention_tree")
