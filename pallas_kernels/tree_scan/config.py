"""Block sizes of the `tree_scan` kernel.

Defaults are chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); a device's
own come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels import tuning


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


# By type of the inputs. Full float32 products need many registers.
DEFAULTS = {
    "bfloat16": BlockSizes(queries=32, keys=32, state=64, num_warps=4, num_stages=2),
    "float32": BlockSizes(queries=16, keys=16, state=32, num_warps=4, num_stages=2),
}


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type."""
    return tuning.chosen("tree_scan", tuning.dtype_case(dtype), DEFAULTS)
