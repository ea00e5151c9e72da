"""Checks every kernel of `benchmarks.cases` against XLA and against float64."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import CASES
from benchmarks.cases.base import LIMITS, Problem, as_tuple, relative_error, small
from benchmarks.cases.checks import errors, exact, refused, within_limits
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tasks import Row, Task

# Two correct results may differ by more than the error of each against float64.
APART = 2.5


def gate(scale: Scale) -> list[Task]:
    """Every kernel at one real shape: against float64, against XLA, and against itself.

    A result that changes from call to call is a race between the programs of a kernel.
    """
    repeats = functools.partial(_repeats, scale.repeats)
    return [Task(name, functools.partial(_gated, scale, name), repeats) for name in CASES]


def _gated(scale: Scale, name: str) -> tuple[Callable[[], tuple], tuple, Row]:
    """The kernel as a call, its first result, and the row so far."""
    case = CASES[name]
    shape = scale.gated[case.kind]
    nodes = scale.checked_nodes[0]
    problem = Problem(scale.shapes[case.kind][shape], nodes, scale.dtype, 2, scale.capacity)
    operands = case.operands(problem)
    truth = exact(case, problem, operands)
    row: Row = {"kernel": name, "shape": shape, "nodes": nodes, "dtype": scale.dtype, "errors": {}}
    results = {}
    for implementation in scale.implementations:  # the kernel last
        run = jax.jit(functools.partial(case.function, implementation=implementation))
        results[implementation] = got = as_tuple(jax.block_until_ready(run(*operands)))
        row["errors"][implementation] = [*map(relative_error, got, truth)]
    row["from_xla"] = [*map(relative_error, got, results["xla"])]
    row["right"] = all(
        within_limits(case, scale.dtype, found) for found in row["errors"].values()
    ) and all(
        error <= APART * LIMITS[output, scale.dtype]
        for error, output in zip(row["from_xla"], case.outputs, strict=True)
    )
    return lambda: as_tuple(run(*operands)), got, row


def _repeats(count: int, prepared: tuple[Callable[[], tuple], tuple, Row]) -> Row:
    call, first, row = prepared
    equal = jax.jit(same_bits)
    changed = count - int(sum(equal(first, call()) for _ in range(count)))
    row |= {"repeats": count, "changed": changed, "right": row["right"] and not changed}
    return row | {"errors": _written(row["errors"]), "from_xla": _written(row["from_xla"])}


def same_bits(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> jax.Array:
    """Whether all arrays have the same bits; a NaN equals itself."""

    def bits(value: jax.Array) -> jax.Array:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")

    pairs = zip(one, other, strict=True)
    return jnp.stack([jnp.all(bits(a) == bits(b)) for a, b in pairs]).all().astype(jnp.int32)


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
    row: Row = {"kernel": name, "shape": shape, "nodes": nodes, "dtype": dtype}
    problem = Problem(small(full), nodes, dtype, batch=2, capacity=scale.capacity)
    if reason := refused(case, problem._replace(shape=full)):
        return row | {"refused": reason, "right": True}
    found = errors(case, problem, scale.implementations)
    right = all(within_limits(case, dtype, error) for error in found.values())
    return row | {"errors": _written(found), "right": right}


def _written(errors: Any) -> Any:
    """The same errors for JSON, which has no infinity."""
    return jax.tree.map(lambda error: "not finite" if error == math.inf else error, errors)
