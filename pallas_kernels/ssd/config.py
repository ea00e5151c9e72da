"""Block sizes of the `ssd` kernel.

With the defaults nothing spills on sm_80 to sm_90 (`benchmarks/results/spills.json`). A device's
own sizes come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block.

    Attributes:
        positions: sequence positions per block.
        state: elements of the state per program: channels of the head times state size.
        part: state channels per partial product.
        num_warps, num_stages: Triton's.
    """

    positions: int
    state: int
    part: int
    num_warps: int
    num_stages: int


# By dtype of the inputs. Full float32 products need many registers.
DEFAULTS = {
    "bfloat16": BlockSizes(positions=32, state=32 * 128, part=64, num_warps=8, num_stages=1),
    "float32": BlockSizes(positions=16, state=16 * 128, part=32, num_warps=8, num_stages=1),
}


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this dtype."""
    return tuning.chosen("ssd", tuning.dtype_case(dtype), DEFAULTS)
