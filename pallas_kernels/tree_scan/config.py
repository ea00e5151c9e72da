"""Block sizes of the `tree_scan` kernel.

Chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); not tuned on a device yet.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time; an axis that is smaller is one block.

    Attributes:
        queries, keys: nodes of a block.
        state: state channels that a partial product covers.
        num_warps, num_stages: Triton's.
    """

    queries: int
    keys: int
    state: int
    num_warps: int
    num_stages: int


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type. Full float32 products need many registers."""
    if jnp.dtype(dtype) == jnp.float32:
        return BlockSizes(queries=16, keys=16, state=32, num_warps=4, num_stages=2)
    return BlockSizes(queries=32, keys=32, state=64, num_warps=4, num_stages=2)
