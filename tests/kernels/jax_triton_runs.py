"""Lowers the jax-triton kernels, or runs them in Triton's interpreter; prints one line of JSON.

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
from pallas_kernels.tree_scan.reference import replay as replay_reference
from pallas_kernels.tree_scan.reference import tree_scan as scan_reference
from tests.cases.base import relative_error
from tests.cases.tree_scan import CASES, inputs


def lowered():
    """Of each kernel, type, size and GPU: how many Triton calls, and whether one is in place."""
    found = []
    struct, f32 = jax.ShapeDtypeStruct, jnp.float32
    for nodes, dtype in ((13, f32), (64, f32), (13, jnp.bfloat16), (64, jnp.bfloat16)):
        x, dt, A = struct((1, nodes, 8, 64), dtype), struct((1, nodes, 8), f32), struct((8,), f32)
        B, D = struct((1, nodes, 2, 128), dtype), struct((8, 64), f32)
        state, mask = struct((1, 8, 64, 128), f32), struct((1, nodes, nodes), jnp.bool_)
        path = struct((1, nodes), jnp.bool_)
        for name, function, arguments in (
            ("tree_scan", jax_triton.tree_scan, (x, dt, A, B, B, D, state, mask)),
            ("replay", jax_triton.replay, (x, dt, A, B, state, path)),
        ):
            for capability in (80, 90):
                compiled_for = functools.partial(function, compute_capability=capability)
                traced = jax.jit(compiled_for).trace(*arguments)
                code = traced.lower(lowering_platforms=("cuda",)).as_text()
                calls = code.count("custom_call @triton_kernel_call")
                found.append((name, calls, "output_operand_alias" in code))
    return found


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


def interpreted_call(
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
    """`jax_triton_versions.call` in the interpreter; outputs never share memory with inputs."""
    output = np.zeros(out_shape.shape, out_shape.dtype)
    kernel[grid](*(Tensor(np.ascontiguousarray(value)) for value in (*arguments, output)), **sizes)
    return output


def interpreted():
    """Errors of each case against float64."""
    jax_triton_versions.call = interpreted_call
    jax_triton_versions.passes_aliased_outputs = lambda: True
    errors = {}
    for case in CASES.values():
        if case.bf16:
            continue
        values = inputs(case)
        names = ("x", "dt", "A", "B", "C", "D", "state")
        x, dt, A, B, C, D, state = (getattr(values, name) for name in names)
        f32 = {name: getattr(values, name).astype(np.float32) for name in names}
        first = case.nodes - (case.queries or case.nodes)
        exists = slice(first, case.nodes - case.padded)
        y = jax_triton.tree_scan(
            *(f32[name] for name in ("x", "dt", "A", "B")),
            f32["C"][:, first:],
            *(f32["D"], f32["state"], values.mask),
        )
        truth, _ = scan_reference(x, dt, A, B, C, D, state, values.parents)
        path = values.path
        new_state = jax_triton.replay(*(f32[name] for name in ("x", "dt", "A", "B", "state")), path)
        errors[case.name] = {
            "tree_scan": relative_error(y[:, : exists.stop - first], truth[:, exists]),
            "replay": relative_error(new_state, replay_reference(x, dt, A, B, state, path)),
        }
    return errors


if __name__ == "__main__":
    print(json.dumps({"lowered": lowered, "interpreted": interpreted}[sys.argv[1]]()))  # noqa: T201
