"""Products of rows with matrices."""

from pallas_kernels.matmul.api import matmul, normed_product, partial_sums, rows
from pallas_kernels.matmul.packed import PackedMatrix
from pallas_kernels.matmul.quantized import GROUP, KINDS, QuantizedMatrix

__all__ = [
    "GROUP",
    "KINDS",
    "PackedMatrix",
    "QuantizedMatrix",
    "matmul",
    "normed_product",
    "partial_sums",
    "rows",
]
