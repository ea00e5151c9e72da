"""Block sizes of the `gated_rms_norm` kernel.

Chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); not tuned on a device yet.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time.

    Attributes:
        block: numbers that are loaded at once, at most.
        num_warps: Triton's.
    """

    block: int
    num_warps: int


def block_sizes(group_size: int) -> BlockSizes:
    """Block sizes for groups of this size, all of which a program holds in registers."""
    return BlockSizes(block=4096, num_warps=4 if group_size <= 4096 else 8)
