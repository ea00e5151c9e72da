"""Block sizes of the `replay` kernel.

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
        nodes: nodes of a block.
        state: numbers of the state that a program owns: channels of the head times state size.
        num_warps, num_stages: Triton's.
    """

    nodes: int
    state: int
    num_warps: int
    num_stages: int


# By type of the inputs. Full float32 products need many registers.
DEFAULTS = {
    "bfloat16": BlockSizes(nodes=32, state=32 * 128, num_warps=4, num_stages=1),
    "float32": BlockSizes(nodes=16, state=32 * 128, num_warps=8, num_stages=1),
}


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type."""
    return tuning.chosen("replay", tuning.dtype_case(dtype), DEFAULTS)
