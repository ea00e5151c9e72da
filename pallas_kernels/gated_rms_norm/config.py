"""Block sizes of the `gated_rms_norm` kernel.

Defaults are chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); a device's
own come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time.

    Attributes:
        block: numbers that are loaded at once, at most.
        num_warps: Triton's.
    """

    block: int
    num_warps: int


# By size of a group, all of which a program holds in registers.
DEFAULTS = {
    "groups to 4096": BlockSizes(block=4096, num_warps=4),
    "larger groups": BlockSizes(block=4096, num_warps=8),
}


def case(group_size: int) -> str:
    """The case of `DEFAULTS` that groups of this size are."""
    return "groups to 4096" if group_size <= 4096 else "larger groups"


def block_sizes(group_size: int) -> BlockSizes:
    """Block sizes for groups of this size."""
    return tuning.chosen("gated_rms_norm", case(group_size), DEFAULTS)
