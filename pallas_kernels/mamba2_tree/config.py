"""Block sizes of the `mamba2_tree` kernel.

Defaults are those of `replay_tree_scan`, with which this does not spill either; a device's own come
from its table (`pallas_kernels/tuned.py`).
"""

from jax.typing import DTypeLike

from pallas_kernels import tuned
from pallas_kernels.replay_tree_scan.config import DEFAULTS, BlockSizes

__all__ = ["DEFAULTS", "BlockSizes", "block_sizes"]


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type."""
    return tuned.chosen("mamba2_tree", tuned.dtype_case(dtype), DEFAULTS)
