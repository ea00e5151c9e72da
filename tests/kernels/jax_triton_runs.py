"""Lowers the jax-triton kernel, or runs it in Triton's interpreter; prints one line of JSON.

    python -m tests.kernels.jax_triton_runs lowered
    TRITON_INTERPRET=1 python -m tests.kernels.jax_triton_runs interpreted

Separate processes (`test_jax_triton.py` starts them): TRITON_INTERPRET must be set before
triton is imported, and Triton cannot compile what pytest's type checking has wrapped. The
interpreter does not do bf16.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl

from pallas_kernels.tree_scan import jax_triton, jax_triton_versions
from pallas_kernels.tree_scan.reference import replay as reference
from tests.cases.base import relative_error
from tests.cases.tree_scan import CASES, inputs, named


def lowered():
    """Of each type, size and GPU: how many Triton calls, and whether one is in place."""
    found = []
    struct, f32 = jax.ShapeDtypeStruct, jnp.float32
    for nodes, dtype in ((13, f32), (64, f32), (13, jnp.bfloat16), (64, jnp.bfloat16)):
        x, dt, A = struct((1, nodes, 8, 64), dtype), struct((1, nodes, 8), f32), struct((8,), f32)
        B, state = struct((1, nodes, 2, 128), dtype), struct((1, 8, 64, 128), f32)
        for capability in (80, 90):
            run = functools.partial(jax_triton.replay, compute_capability=capability)
            traced = jax.jit(run).trace(x, dt, A, B, state, struct((1, nodes), jnp.bool_))
            code = traced.lower(lowering_platforms=("cuda",)).as_text()
            calls = code.count("custom_call @triton_kernel_call")
            found.append((calls, "output_operand_alias" in code))
    return found


TYPES = {"float32": tl.float32, "int32": tl.int32}


class Tensor:
    """As much of a torch tensor as the interpreter asks for, around a NumPy array."""

    def __init__(self, array):
        self.array = array
        self.dtype = TYPES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Tensor(self.array)

    def copy_(self, *_):
        pass

    def set_(self, *_):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)


def interpreted_call(
    *arguments,
    kernel,
    out_shape,
    grid,
    name,
    input_output_aliases=(),
    **sizes,
):
    """`jax_triton_versions.call` in the interpreter; outputs never share memory with inputs."""
    output = np.zeros(out_shape.shape, out_shape.dtype)
    kernel[grid](*(Tensor(np.ascontiguousarray(value)) for value in (*arguments, output)), **sizes)
    return output


def interpreted():
    """The error of each case against float64."""
    jax_triton_versions.call = interpreted_call
    jax_triton_versions.passes_aliased_outputs = lambda: True
    errors = {}
    for case in CASES.values():
        if not case.bf16:
            *exact, path = named(inputs(case), ("x", "dt", "A", "B", "state", "path"))
            state = jax_triton.replay(*(value.astype(np.float32) for value in exact), path)
            errors[case.name] = relative_error(state, reference(*exact, path))
    return errors


if __name__ == "__main__":
    print(json.dumps({"lowered": lowered, "interpreted": interpreted}[sys.argv[1]]()))  # noqa: T201
