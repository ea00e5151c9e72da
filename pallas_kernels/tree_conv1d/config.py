"""Block sizes of the `tree_conv1d` kernel.

Defaults are chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); a device's
own come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from pallas_kernels import tuning


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


# Nothing here is large enough to depend on types.
DEFAULTS = {"any": BlockSizes(queries=16, channels=256, num_warps=4)}


def block_sizes() -> BlockSizes:
    """Block sizes for inputs of any type."""
    return tuning.chosen("tree_conv1d", "any", DEFAULTS)
