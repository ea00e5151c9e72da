"""Block sizes of the `mamba2_tree` kernel.

Defaults are those with which this does not spill, with records in a queue or without
(`benchmarks.spills`); a device's own come from its table (`pallas_kernels/tuning.py`).
"""

from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.replay_tree_scan import config as replay_tree_scan
from pallas_kernels.replay_tree_scan.config import BlockSizes

__all__ = ["DEFAULTS", "USUAL_STATE", "BlockSizes", "block_sizes", "case"]

USUAL_STATE = 128
_WIDE = f"bfloat16, states above {USUAL_STATE}"

DEFAULTS = replay_tree_scan.DEFAULTS | {
    "bfloat16": BlockSizes(
        replayed=16, queries=32, keys=32, state=16 * 128, part=128, num_warps=8, num_stages=1
    ),
    _WIDE: BlockSizes(
        replayed=16, queries=32, keys=64, state=16 * 256, part=128, num_warps=8, num_stages=1
    ),
}
# Of `_WIDE` where the record is in a queue. The tuner, which has no queue, does not touch them.
WIDE_IN_QUEUE = BlockSizes(
    replayed=16, queries=64, keys=64, state=16 * 256, part=64, num_warps=8, num_stages=1
)


def case(dtype: DTypeLike, state_size: int) -> str:
    """The case of `DEFAULTS` that these inputs are."""
    name = tuning.dtype_case(dtype)
    return _WIDE if name == "bfloat16" and state_size > USUAL_STATE else name


def block_sizes(dtype: DTypeLike, state_size: int, *, queued: bool = False) -> BlockSizes:
    """Block sizes for inputs of this type and states of this size."""
    name = case(dtype, state_size)
    return (
        WIDE_IN_QUEUE if queued and name == _WIDE else tuning.chosen("mamba2_tree", name, DEFAULTS)
    )
