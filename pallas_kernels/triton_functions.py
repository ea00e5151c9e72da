"""What the jax-triton kernels share. Imports triton: only they import this."""

import triton
import triton.language as tl


@triton.jit
def dot(left, right, total):
    """`total + left @ right` in float32 accuracy; see `triton.dot`."""
    if left.dtype == right.dtype:  # float32 as such; "ieee" means nothing for bf16
        total = tl.dot(left, right, total, input_precision="ieee")
    elif left.dtype == tl.bfloat16:
        high = right.to(tl.bfloat16)
        low = (right - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(left, high, tl.dot(left, low, total))
    else:
        high = left.to(tl.bfloat16)
        low = (left - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, right, tl.dot(low, right, total))
    return total
