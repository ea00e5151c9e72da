"""Products of rows with packed matrices."""

from pallas_kernels.matmul.api import matmul
from pallas_kernels.matmul.packed import PackedMatrix

__all__ = ["PackedMatrix", "matmul"]
