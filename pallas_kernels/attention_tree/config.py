"""Block sizes of the `attention_tree` kernel.

Defaults are those of `tree_attention`, which were chosen for both; a device's own come from its
table (`pallas_kernels/tuning.py`).
"""

import functools

from pallas_kernels.tree_attention import config as tree_attention
from pallas_kernels.tree_attention.config import DEFAULTS, BlockSizes

__all__ = ["DEFAULTS", "BlockSizes", "block_sizes"]

block_sizes = functools.partial(tree_attention.block_sizes, op="attention_tree")
