"""Checks every kernel of `benchmarks.cases`, and XLA's computation, against float64."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import CASES
from benchmarks.cases.base import (
    LIMITS,
    Case,
    Problem,
    as_tuple,
    float64,
    relative_error,
    small,
    trees,
)
from benchmarks.cases.checks import refused
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tasks import Row, Task


def gate(scale: Scale) -> list[Task]:
    """Every kernel at one real shape: against float64, and against itself.

    A result that changes from call to call is a race between the programs of a kernel.
    """
    return [Task(name, functools.partial(_gated, scale, name)) for name in CASES]


def _gated(scale: Scale, name: str) -> Row:
    case = CASES[name]
    shape, nodes, count = scale.gated[case.kind], scale.checked_nodes[0], scale.repeats
    problem = Problem(scale.shapes[case.kind][shape], nodes, scale.dtype, 2, scale.capacity)
    row, operands, run = _checked(scale, case, problem)
    first, equal = as_tuple(run(*operands)), jax.jit(same_bits)
    changed = count - int(sum(equal(first, as_tuple(run(*operands))) for _ in range(count)))
    row |= {"repeats": count, "changed": changed, "right": row["right"] and not changed}
    return {"kernel": name, "shape": shape} | row


def _checked(scale: Scale, case: Case, problem: Problem) -> tuple[Row, tuple, Any]:
    """A row with the relative errors of all outputs, the operands, and the compiled kernel."""
    operands = case.operands(problem)
    inputs = [
        float64(value) if jnp.issubdtype(value.dtype, jnp.floating) else np.asarray(value)
        for value in operands
    ]
    truth = case.reference(*inputs, trees(problem)[0])
    limits = [LIMITS[problem.dtype][output] for output in case.outputs]
    row: Row = {"nodes": problem.nodes, "dtype": problem.dtype, "errors": {}, "right": True}
    for name in scale.implementations:  # the kernel last
        run = jax.jit(functools.partial(case.function, implementation=name))
        try:
            errors = [*map(relative_error, as_tuple(run(*operands)), truth)]
        except Exception as error:  # a kernel that does not compile must not hide the others
            row["right"], row["errors"][name] = False, f"failed: {error!s:.500}"
            continue
        row["right"] &= all(error <= limit for error, limit in zip(errors, limits, strict=True))
        # JSON has no infinity.
        row["errors"][name] = ["not finite" if error == math.inf else error for error in errors]
    return row, operands, run


def same_bits(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> jax.Array:
    """Whether all arrays have the same bits; a NaN equals itself."""
    pairs = zip(one, other, strict=True)
    equal = [jnp.all(a.view("uint8") == b.view("uint8")) for a, b in pairs]
    return jnp.stack(equal).all().astype(jnp.int32)


def correctness(scale: Scale) -> list[Task]:
    """Every kernel and its XLA implementation, on all shapes cut to two heads or groups.

    The second row of the batch has another tree, an empty path and a shorter cache.
    """
    return [
        Task(
            f"{name}, {shape}, {nodes}, {dtype}",
            functools.partial(_on_shape, scale, nodes, dtype, name, shape),
        )
        for nodes in scale.checked_nodes
        for dtype in scale.checked_dtypes
        for name in scale.cases
        for shape in scale.shapes[CASES[name].kind]
    ]


def _on_shape(scale: Scale, nodes: int, dtype: str, name: str, shape: str) -> Row:
    case = CASES[name]
    full = scale.shapes[case.kind][shape]
    problem = Problem(small(full), nodes, dtype, batch=2, capacity=scale.capacity)
    row: Row = {"kernel": name, "shape": shape}
    if reason := refused(case, problem._replace(shape=full)):
        return row | {"nodes": nodes, "dtype": dtype, "refused": reason, "right": True}
    return row | _checked(scale, case, problem)[0]
