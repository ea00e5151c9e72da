"""Block sizes of the `expert_mlps` kernel.

With the defaults nothing spills on sm_80 to sm_90 (`benchmarks/results/spills.json`). A device's
own sizes come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on.

    Attributes:
        rows: tokens of one expert per block; fewer if experts get fewer on average.
        columns: output columns per block; reduced to a divisor of their number.
        inner: contracted channels per partial product; reduced to a divisor of their number.
        num_warps, num_stages: Triton's.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# By dtype of the inputs. Full float32 products need many registers.
DEFAULTS = {
    "bfloat16": BlockSizes(rows=64, columns=64, inner=64, num_warps=4, num_stages=3),
    "float32": BlockSizes(rows=16, columns=32, inner=32, num_warps=4, num_stages=2),
}


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this dtype."""
    return tuning.chosen("expert_mlps", tuning.dtype_case(dtype), DEFAULTS)
