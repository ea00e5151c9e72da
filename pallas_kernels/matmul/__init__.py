"""Products of rows with matrices."""

from pallas_kernels.matmul.api import matmul, rows
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.matmul.quantized import GROUP, QuantizedMatrix

__all__ = ["GROUP", "PackedMatrix", "QuantizedMatrix", "matmul", "rows"]
