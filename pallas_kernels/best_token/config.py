"""Block sizes of the `best_token` kernel.

Defaults are chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); a device's
own come from its table (`pallas_kernels/tuning.py`).
"""

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time.

    Attributes:
        rows: positions of a block; fewer are one block.
        words: of the vocabulary, in a block.
        inner: of the width, in a partial product; at most, what divides the width.
        num_warps, num_stages: Triton's.
    """

    rows: int
    words: int
    inner: int
    num_warps: int
    num_stages: int


# By type of the inputs. Full float32 products need many registers.
DEFAULTS = {
    "bfloat16": BlockSizes(rows=64, words=128, inner=64, num_warps=4, num_stages=3),
    "float32": BlockSizes(rows=16, words=64, inner=32, num_warps=4, num_stages=2),
}


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type."""
    return tuning.chosen("best_token", tuning.dtype_case(dtype), DEFAULTS)
