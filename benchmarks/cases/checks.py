"""What is done with a case: compare it with float64, count its bytes, repeat its calls."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases.base import LIMITS, Case, Problem, as_tuple, float64, relative_error, trees

UNROLLED = 8


def refused(case: Case, problem: Problem) -> str | None:
    """Why the kernel refuses a problem, or None."""
    operands = jax.eval_shape(functools.partial(case.operands, problem))
    try:
        jax.eval_shape(functools.partial(case.function, implementation="pallas"), *operands)
    except ValueError as error:
        return str(error)
    return None


def exact(case: Case, problem: Problem, operands: tuple[jax.Array, ...]) -> tuple[np.ndarray, ...]:
    """The outputs in float64."""
    inputs = [
        float64(value) if jnp.issubdtype(value.dtype, jnp.floating) else np.asarray(value)
        for value in operands
    ]
    return case.reference(*inputs, trees(problem)[0])


def errors(
    case: Case, problem: Problem, implementations: tuple[str, ...]
) -> dict[str, list[float] | str]:
    """Relative errors of the outputs against float64 by implementation, or how it failed."""
    operands = case.operands(problem)
    truth = exact(case, problem, operands)
    result: dict[str, list[float] | str] = {}
    for implementation in implementations:
        run = jax.jit(functools.partial(case.function, implementation=implementation))
        try:
            got = as_tuple(run(*operands))
            result[implementation] = [
                relative_error(value, wanted) for value, wanted in zip(got, truth, strict=True)
            ]
        except Exception as error:  # a kernel that does not compile must not hide the others
            result[implementation] = f"failed: {error!s:.500}"
    return result


def within_limits(case: Case, dtype: str, found: list[float] | str) -> bool:
    """Whether `found` are errors, and all of them within `LIMITS`."""
    if isinstance(found, str):
        return False
    limits = [LIMITS[output, dtype] for output in case.outputs]
    return all(error <= limit for error, limit in zip(found, limits, strict=True))


def bytes_moved(case: Case, operands: tuple[jax.Array, ...]) -> int:
    """Bytes that a call must move: operands read once, results written once."""
    outputs = jax.eval_shape(functools.partial(case.function, implementation="xla"), *operands)
    total = sum(value.size * value.dtype.itemsize for value in (*operands, *as_tuple(outputs)))
    return total - case.unread(operands)


def repeated(
    function: Callable[..., Any], feedback: Mapping[int, int], count: int
) -> Callable[..., Any]:
    """Calls a function `count` times in one program, each call after the one before.

    All operands but those updated in place are the same in each call, so small problems run with
    a warm L2 cache. The body of the loop is `UNROLLED` calls: XLA makes a CUDA graph of at least 5
    launches, and launches one by one what is less.
    """

    def run(*operands: jax.Array) -> tuple:
        def step(_: Any, before: tuple) -> tuple:
            # Without the barrier XLA hoists the call out of the loop.
            held, before = lax.optimization_barrier((operands, before))
            held = [*held]
            for operand, output in feedback.items():
                held[operand] = before[output]
            return as_tuple(function(*held))

        return lax.fori_loop(1, count, step, as_tuple(function(*operands)), unroll=UNROLLED)

    return run
