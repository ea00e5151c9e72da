"""Block sizes of the `replay_tree_scan` kernel.

Chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); not tuned on a device yet.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time; an axis that is smaller is one block.

    Attributes:
        replayed: nodes of the previous tree of a block.
        queries, keys: nodes of the new tree of a block.
        state: numbers of the state that a program owns: channels of the head times state size.
        part: state channels that a partial product covers.
        num_warps, num_stages: Triton's.
    """

    replayed: int
    queries: int
    keys: int
    state: int
    part: int
    num_warps: int
    num_stages: int


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type. Full float32 products need many registers."""
    if jnp.dtype(dtype) == jnp.float32:
        return BlockSizes(
            replayed=16, queries=16, keys=16, state=32 * 128, part=32, num_warps=8, num_stages=1
        )
    return BlockSizes(
        replayed=32, queries=32, keys=32, state=32 * 128, part=64, num_warps=4, num_stages=1
    )
