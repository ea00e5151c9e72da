"""Block sizes of the `tree_attention` and `tree_attention_layer` kernels.

They are chosen to avoid register spills on sm_80 to sm_90; a few float32 programs still
spill (`benchmarks/results/spills.json`). They were timed on no GPU yet.
"""

import dataclasses
from typing import Any

from jax.typing import DTypeLike

from pallas_kernels import triton as tb


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks that a program works on; an axis that is smaller is one block."""

    rows: int  # score rows per block: queries times the query heads that share a key head
    keys: int  # cache positions or nodes per block
    num_warps: int  # Triton's
    splits: int = 1  # programs that share the cache of one batch row and key head (split-K)


NUM_STAGES = 2  # Triton's
# Warps that fill the GPU: 8 on each of an H100's 132 multiprocessors. More splits only write more
# partial sums, each as large as the output in float32.
_BUSY_WARPS = 1024
# Wider heads spill with all but smaller blocks.
_WIDE_HEAD = 128
_NARROW_HEAD = 64
# Programs that are not split spill, unless rows are many, as in a chunk of a prompt, or blocks are
# small, as for wide bfloat16 heads.
_MANY_ROWS = 256
# A batch that leaves nothing to split, for blocks that are the same in all batches.
ANY_BATCH: dict[str, Any] = dict(num_rows=_MANY_ROWS, num_groups=1 << 20, capacity=1 << 20)


def block_sizes(
    dtype: DTypeLike, *, num_rows: int, num_groups: int, capacity: int, head_dim: int
) -> BlockSizes:
    """Block sizes for these inputs: enough splits to fill the GPU, at least two blocks each.

    Two splits are the minimum where one would spill, however many programs there are: the second
    costs a small reduction, spills cost more. A group is a row's key head; its rows are queries
    times the query heads that share it.
    """
    float32, is_wide = tb.dtype_case(dtype) == "float32", head_dim > _WIDE_HEAD
    if float32:  # full products need many registers
        blocks = BlockSizes(rows=16, keys=16 if is_wide else 32, num_warps=4)
    elif is_wide:
        blocks = BlockSizes(rows=16, keys=32, num_warps=4)
    else:
        size = 32 if num_rows <= 32 else 64
        blocks = BlockSizes(rows=size, keys=size, num_warps=8)
    programs = num_groups * -(-num_rows // blocks.rows)
    enough = _BUSY_WARPS // (blocks.num_warps * programs)
    splits = min(enough, -(-capacity // blocks.keys) // 2)
    one_fits = not capacity or not (float32 or (num_rows <= _MANY_ROWS and not is_wide))
    return dataclasses.replace(blocks, splits=max(splits, 1 if one_fits else 2))


_MOST_SPLITS = 32  # more only write more parts of the softmax


def layer_block_sizes(
    dtype: DTypeLike, *, num_rows: int, num_groups: int, head_dim: int
) -> BlockSizes:
    """Block sizes of `tree_attention_layer`: enough splits to fill the GPU for one row of a batch.

    Keys and splits decide the order of sums. So they depend on nothing that a step may change, such
    as rows, batch or capacity.
    """
    if tb.dtype_case(dtype) == "float32":
        blocks = BlockSizes(rows=16, keys=16, num_warps=8)
    elif head_dim > _WIDE_HEAD:
        blocks = BlockSizes(rows=16, keys=32, num_warps=4)
    else:  # narrow heads would spill with fewer rows
        blocks = BlockSizes(rows=64 if head_dim <= _NARROW_HEAD else 32, keys=32, num_warps=8)
    splits = min(_MOST_SPLITS, -(-_BUSY_WARPS // (blocks.num_warps * num_groups)))
    rows = min(blocks.rows, tb.padded_size(num_rows))
    return dataclasses.replace(blocks, rows=rows, splits=splits)
