"""Checks every kernel of `benchmarks.cases`, and XLA's computation, against float64."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import CASES
from benchmarks.cases.base import Case, Problem, as_tuple, small
from benchmarks.cases.checks import errors, jitted, refused, within_limits
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
    operands = case.operands(problem)
    runs = jitted(case, scale.implementations)
    row = _row(case, problem, operands, runs)
    *_, run = runs.values()  # the kernel
    first, equal = as_tuple(run(*operands)), jax.jit(same_bits)
    changed = count - int(sum(equal(first, as_tuple(run(*operands))) for _ in range(count)))
    row |= {"repeats": count, "changed": changed, "right": row["right"] and not changed}
    return {"kernel": name, "shape": shape} | row


def _row(case: Case, problem: Problem, operands: tuple, runs: Mapping[str, Any]) -> Row:
    found = errors(case, problem, operands, runs)
    right = all(within_limits(case, problem.dtype, error) for error in found.values())
    # JSON has no infinity.
    written = jax.tree.map(lambda error: "not finite" if error == math.inf else error, found)
    return {"nodes": problem.nodes, "dtype": problem.dtype, "errors": written, "right": right}


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
            functools.partial(_checked, scale, nodes, dtype, name, shape),
        )
        for nodes in scale.checked_nodes
        for dtype in scale.checked_dtypes
        for name in scale.cases
        for shape in scale.shapes[CASES[name].kind]
    ]


def _checked(scale: Scale, nodes: int, dtype: str, name: str, shape: str) -> Row:
    case = CASES[name]
    full = scale.shapes[case.kind][shape]
    problem = Problem(small(full), nodes, dtype, batch=2, capacity=scale.capacity)
    row: Row = {"kernel": name, "shape": shape}
    if reason := refused(case, problem._replace(shape=full)):
        return row | {"nodes": nodes, "dtype": dtype, "refused": reason, "right": True}
    runs = jitted(case, scale.implementations)
    return row | _row(case, problem, case.operands(problem), runs)
