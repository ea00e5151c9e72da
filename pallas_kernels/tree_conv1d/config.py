"""Block sizes of the `tree_conv1d` kernel.

With the defaults nothing spills in bfloat16, and little in float32 from 16 nodes on
(`benchmarks/results/spills.json`, sm_90). A device's own block sizes come from its table
(`pallas_kernels/tuning.py`).
"""

import dataclasses

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block.

    Attributes:
        queries: nodes of a block.
        channels: most channels of a block; the largest power of two below that fits is taken.
        num_warps: Triton's.
    """

    queries: int
    channels: int
    num_warps: int


# One case: the blocks are too small for the type to matter.
DEFAULTS = {"any": BlockSizes(queries=8, channels=64, num_warps=4)}


def block_sizes() -> BlockSizes:
    """Block sizes for inputs of any type."""
    return tuning.chosen("tree_conv1d", "any", DEFAULTS)
