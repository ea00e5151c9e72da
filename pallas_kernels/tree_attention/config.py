"""Block sizes of the `tree_attention` kernel.

Chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); not tuned on a device yet.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import triton_backend as tb

# Warps that keep the GPUs of today busy, 8 on each of an H100's 132 processors. More shares of a
# cache than that only mean more partial sums, each as large as the output in float32.
_WARPS = 1024


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time; an axis that is smaller is one block.

    Attributes:
        rows: queries times the query heads of a group, of a block.
        keys: places of the cache, or nodes, of a block.
        splits: how many programs share the cache of a row and a group.
        num_warps, num_stages: Triton's.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def block_sizes(dtype: DTypeLike, *, num_rows: int, num_groups: int, capacity: int) -> BlockSizes:
    """Block sizes for inputs of this type. Full float32 products need many registers.

    Args:
        dtype: of query, keys and values.
        num_rows: queries times query heads of a group.
        num_groups: rows of the batch times key and value heads.
        capacity: places of the cache.
    """
    wide = jnp.dtype(dtype) == jnp.float32
    rows, keys = (16, 32) if wide else (min(64, tb.padded_size(num_rows)), 64)
    num_warps = 8 if rows == 64 else 4
    wanted = _WARPS // (num_warps * num_groups * -(-num_rows // rows))
    splits = max(1, min(wanted, -(-capacity // keys) // 2))  # at least two blocks each
    return BlockSizes(rows, keys, splits, num_warps, num_stages=2)
