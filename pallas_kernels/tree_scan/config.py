"""Block sizes of the `tree_scan` kernel.

With the defaults one case spills on sm_90, Falcon-H1-1.5B's state of 256 channels on one node
(`benchmarks/results/spills.json`). A device's own block sizes come from its table
(`pallas_kernels/tuning.py`).
"""

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block.

    Attributes:
        replayed: nodes of the previous tree per block.
        queries, keys: nodes of the new tree per block.
        state: elements of the state per program: channels of the head times state size.
        part: state channels per partial product.
        num_warps, num_stages: Triton's.
    """

    replayed: int
    queries: int
    keys: int
    state: int
    part: int
    num_warps: int
    num_stages: int


# By type of the inputs. Full float32 products need many registers.
LARGE_HEAD = "bfloat16, large heads"
_USUAL_HEAD = 64 * 128  # elements of its state
DEFAULTS = {
    "bfloat16": BlockSizes(
        replayed=16, queries=32, keys=32, state=64 * 128, part=128, num_warps=4, num_stages=1
    ),
    LARGE_HEAD: BlockSizes(
        replayed=16, queries=32, keys=32, state=128 * 128, part=128, num_warps=8, num_stages=1
    ),
    "float32": BlockSizes(
        replayed=16, queries=16, keys=16, state=32 * 128, part=64, num_warps=8, num_stages=1
    ),
}


def case(dtype: DTypeLike, numbers: int) -> str:
    """The case of `DEFAULTS` for inputs of this type and heads with this many state elements."""
    name = tuning.dtype_case(dtype)
    return LARGE_HEAD if name == "bfloat16" and numbers > _USUAL_HEAD else name


def block_sizes(dtype: DTypeLike, numbers: int) -> BlockSizes:
    """Block sizes for inputs of this type and heads with this many state elements."""
    return tuning.chosen("tree_scan", case(dtype, numbers), DEFAULTS)
