"""Block sizes of the `rms_norm` kernels.

With the defaults nothing spills on sm_80 to sm_90 (`benchmarks/results/spills.json`); a device's
own block sizes come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on.

    Attributes:
        block: largest number of elements loaded at once.
        num_warps: Triton's.
    """

    block: int
    num_warps: int


# By size of a group (`add_rms_norm`: a row), all of which a program holds in registers.
DEFAULTS = {
    "groups to 4096": BlockSizes(block=4096, num_warps=4),
    "larger groups": BlockSizes(block=4096, num_warps=8),
}


def case(group_size: int) -> str:
    """The case of `DEFAULTS` for groups of this size."""
    return "groups to 4096" if group_size <= 4096 else "larger groups"


def block_sizes(group_size: int) -> BlockSizes:
    """Block sizes for groups of this size."""
    return tuning.chosen("rms_norm", case(group_size), DEFAULTS)
