"""Block sizes of the `tree_conv1d` kernel.

Chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); not tuned on a device yet.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time; an axis that is smaller is one block.

    Attributes:
        queries: nodes of a block.
        channels: of a block, at most; the largest power of two that divides all of them.
        num_warps: Triton's.
    """

    queries: int
    channels: int
    num_warps: int


def block_sizes() -> BlockSizes:
    """Block sizes; nothing here is large enough to depend on types."""
    return BlockSizes(queries=16, channels=256, num_warps=4)
