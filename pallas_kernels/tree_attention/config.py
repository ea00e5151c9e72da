"""Block sizes of the `tree_attention` kernel.

Defaults are chosen so that as little as possible spills on sm_80 to sm_90: a few programs do, of
float32 mostly (`benchmarks/results/spills.json`). A device's own come from its table
(`pallas_kernels/tuning.py`).
"""

import dataclasses

from jax.typing import DTypeLike

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of what a program works on at a time; an axis that is smaller is one block.

    Attributes:
        rows: queries times the query heads of a group, of a block.
        keys: places of the cache, or nodes, of a block.
        splits: how many programs share the cache of a row and a group.
        num_warps, num_stages: Triton's.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is chosen by measuring; the splits follow from it and from the shapes.

    Attributes:
        rows, keys, num_warps, num_stages: as in `BlockSizes`.
        busy_warps: warps that keep the GPU busy. More shares of a cache than that only mean more
            partial sums, each as large as the output in float32. 1 for one share.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    busy_warps: int

    def block_sizes(self, *, num_rows: int, num_groups: int, capacity: int) -> BlockSizes:
        """As the function of this name."""
        programs = num_groups * -(-num_rows // self.rows)
        wanted = self.busy_warps // (self.num_warps * programs)
        splits = max(1, min(wanted, -(-capacity // self.keys) // 2))  # at least two blocks each
        return BlockSizes(self.rows, self.keys, splits, self.num_warps, self.num_stages)


ONE_SHARE = "bfloat16, one share"
_MANY_ROWS = 256  # of more, as in a piece of a prompt, one share of "bfloat16" does not spill
_WIDE_HEAD = 128  # of more channels all but smaller blocks spill
# By type of the inputs, number of rows and size of heads. Full float32 products need many
# registers. 1024 warps are 8 on each of an H100's 132 processors.
DEFAULTS = {
    "bfloat16, to 32 rows": Choice(rows=32, keys=32, num_warps=8, num_stages=2, busy_warps=1024),
    "bfloat16": Choice(rows=64, keys=64, num_warps=8, num_stages=2, busy_warps=1024),
    "float32": Choice(rows=16, keys=32, num_warps=4, num_stages=2, busy_warps=1024),
    "bfloat16, wide heads": Choice(rows=16, keys=32, num_warps=4, num_stages=2, busy_warps=1024),
    "float32, wide heads": Choice(rows=16, keys=16, num_warps=4, num_stages=2, busy_warps=1024),
    # Where programs are many, or the cache is short: with "bfloat16" one share of few rows spills.
    ONE_SHARE: Choice(rows=32, keys=32, num_warps=4, num_stages=1, busy_warps=1),
}


def case(dtype: DTypeLike, num_rows: int, head_dim: int) -> str:
    """The case of `DEFAULTS` that these inputs are, as far as these tell."""
    name = tuning.dtype_case(dtype)
    if head_dim > _WIDE_HEAD:
        return f"{name}, wide heads"
    return f"{name}, to 32 rows" if name == "bfloat16" and num_rows <= 32 else name


def block_sizes(
    dtype: DTypeLike,
    *,
    num_rows: int,
    num_groups: int,
    capacity: int,
    head_dim: int,
    op: str = "tree_attention",
) -> BlockSizes:
    """Block sizes for inputs of this type.

    Args:
        dtype: of query, keys and values.
        num_rows: queries times query heads of a group.
        num_groups: rows of the batch times key and value heads.
        capacity: places of the cache.
        head_dim: channels of a head.
        op: whose device tables are read.
    """
    sizes = dict(num_rows=num_rows, num_groups=num_groups, capacity=capacity)
    choice = tuning.chosen(op, case(dtype, num_rows, head_dim), DEFAULTS)
    blocks = shared(choice, dtype, **sizes, head_dim=head_dim)
    if blocks is not None:
        return blocks
    blocks = tuning.chosen(op, ONE_SHARE, DEFAULTS).block_sizes(**sizes)
    return dataclasses.replace(blocks, splits=1)


def shared(
    choice: Choice,
    dtype: DTypeLike,
    *,
    num_rows: int,
    num_groups: int,
    capacity: int,
    head_dim: int,
) -> BlockSizes | None:
    """Block sizes by this choice; None where they would be one share, and it is for several."""
    blocks = choice.block_sizes(num_rows=num_rows, num_groups=num_groups, capacity=capacity)
    if blocks.splits > 1 or not capacity or choice.busy_warps == 1:
        return blocks
    if tuning.dtype_case(dtype) == "float32":
        # Of heads of 128 and more, one share spills with all blocks that were tried.
        return dataclasses.replace(blocks, splits=2)
    return blocks if num_rows > _MANY_ROWS or head_dim > _WIDE_HEAD else None
