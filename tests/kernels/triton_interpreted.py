"""Runs the jax-triton kernels in Triton's interpreter, without a GPU, and prints their errors.

A process of its own (`test_jax_triton.py` starts it), because TRITON_INTERPRET must be set before
triton is imported. Float32 only: the interpreter does not do bf16.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl

from pallas_kernels import jax_triton_backend
from pallas_kernels.replay import jax_triton as replay_kernels
from pallas_kernels.replay.reference import replay as replay_reference
from pallas_kernels.tree_scan import jax_triton as scan_kernels
from pallas_kernels.tree_scan.reference import tree_scan as scan_reference
from tests.kernels.cases import CASES, accepted_path, make_inputs, relative_error

TYPES = {"float32": tl.float32, "bool": tl.int1}


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


def interpreted(
    *arguments,
    kernel,
    out_shape,
    grid,
    name,
    num_warps,
    num_stages,
    input_output_aliases=(),
    **sizes,
):
    """`jax_triton_backend.call` in the interpreter; outputs never share memory with inputs."""
    output = np.zeros(out_shape.shape, out_shape.dtype)
    kernel[grid](*(Tensor(np.ascontiguousarray(value)) for value in (*arguments, output)), **sizes)
    return output


def main():
    jax_triton_backend.call = interpreted
    jax_triton_backend.passes_aliased_outputs = lambda: True
    errors = {}
    for case in CASES:
        if case.bf16:
            continue
        inputs = make_inputs(case)
        names = ("x", "dt", "A", "B", "C", "D", "state")
        x, dt, A, B, C, D, state = (getattr(inputs, name) for name in names)
        f32 = {name: getattr(inputs, name).astype(np.float32) for name in names}
        first = case.nodes - (case.queries or case.nodes)
        exists = slice(first, case.nodes - case.padded)
        y = scan_kernels.tree_scan(
            *(f32[name] for name in ("x", "dt", "A", "B")),
            f32["C"][:, first:],
            *(f32["D"], f32["state"], inputs.mask),
        )
        truth, _ = scan_reference(x, dt, A, B, C, D, state, inputs.parents)
        path = accepted_path(inputs)
        new_state = replay_kernels.replay(
            *(f32[name] for name in ("x", "dt", "A", "B", "state")), path
        )
        errors[case.name] = {
            "tree_scan": relative_error(y[:, : exists.stop - first], truth[:, exists]),
            "replay": relative_error(new_state, replay_reference(x, dt, A, B, state, path)),
        }
    print(json.dumps(errors))  # noqa: T201


if __name__ == "__main__":
    main()
