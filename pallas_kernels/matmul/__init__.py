"""Products of rows with packed matrices."""

from pallas_kernels.matmul.api import matmul, rows
from pallas_kernels.matmul.packed import PackedMatrix

__all__ = ["PackedMatrix", "matmul", "rows"]
