"""Block sizes of the `mamba2_tree` kernel.

Defaults are chosen so that nothing spills on sm_80 to sm_90 (`benchmarks/spills.py`); a device's
own come from its table (`pallas_kernels/tuned.py`).
"""

from jax.typing import DTypeLike

from pallas_kernels import tuned
from pallas_kernels.replay_tree_scan.config import BlockSizes

# By type of the inputs. Full float32 products need many registers.
DEFAULTS = {
    "bfloat16": BlockSizes(
        replayed=16, queries=32, keys=32, state=16 * 128, part=128, num_warps=4, num_stages=1
    ),
    "float32": BlockSizes(
        replayed=16, queries=16, keys=16, state=32 * 128, part=32, num_warps=8, num_stages=1
    ),
}


def block_sizes(dtype: DTypeLike) -> BlockSizes:
    """Block sizes for inputs of this type."""
    return tuned.chosen("mamba2_tree", tuned.dtype_case(dtype), DEFAULTS)
