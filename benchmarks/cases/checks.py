"""Compares a case with float64, counts its bytes, and repeats its calls."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases.base import LIMITS, Case, Problem, as_tuple, float64, relative_error, trees

UNROLLED = 8
# Independent calls could overlap in the CUDA graph of a loop's body.
IN_TURN = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


def refused(case: Case, problem: Problem) -> str | None:
    """Why the kernel refuses a problem, or None."""
    operands = jax.eval_shape(functools.partial(case.operands, problem))
    try:
        jax.eval_shape(functools.partial(case.function, implementation="pallas"), *operands)
    except ValueError as error:
        return str(error)
    return None


def jitted(case: Case, implementations: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The op by implementation, each compiled once."""
    return {
        name: jax.jit(functools.partial(case.function, implementation=name))
        for name in implementations
    }


def errors(
    case: Case,
    problem: Problem,
    operands: tuple[jax.Array, ...],
    runs: Mapping[str, Callable[..., Any]],
) -> dict[str, list[float] | str]:
    """Relative errors of the outputs of `runs` against float64, or how they failed."""
    inputs = [
        float64(value) if jnp.issubdtype(value.dtype, jnp.floating) else np.asarray(value)
        for value in operands
    ]
    truth = case.reference(*inputs, trees(problem)[0])
    result: dict[str, list[float] | str] = {}
    for name, run in runs.items():
        try:
            result[name] = [*map(relative_error, as_tuple(run(*operands)), truth)]
        except Exception as error:  # a kernel that does not compile must not hide the others
            result[name] = f"failed: {error!s:.500}"
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
    """A program that calls a function `count` times, each call after the one before.

    It returns the outputs of the last call, and outputs of earlier calls that no call reads.

    All operands but those updated in place are the same in each call, so small problems run with
    a warm L2 cache. The body of the loop has as many calls, up to `UNROLLED`, as divide
    `count - 1`: XLA makes a CUDA graph of 5 launches or more, and launches fewer one by one.
    """
    unrolled = next(size for size in range(UNROLLED, 0, -1) if (count - 1) % size == 0)

    def run(*operands: jax.Array) -> tuple:
        def call(before: tuple) -> tuple[tuple, tuple]:
            # Without the barrier XLA hoists the call out of the loop, or does one for many.
            held, before = lax.optimization_barrier((operands, before))
            held = [*held]
            for operand, output in feedback.items():
                held[operand] = before[output]
            return as_tuple(function(*held)), before

        def kept(outputs: tuple) -> tuple:
            """Outputs that no call reads, which XLA must not leave out."""
            read = {output % len(outputs) for output in feedback.values()}
            return tuple(value for i, value in enumerate(outputs) if i not in read)

        def body(_: Any, carry: tuple) -> tuple:
            last, _ = carry
            all_kept = []
            for _ in range(unrolled):
                last, before = call(last)
                all_kept.append(kept(before))
            return last, all_kept

        first = as_tuple(function(*operands))
        empty = [jax.tree.map(jnp.zeros_like, kept(first))] * unrolled
        return lax.fori_loop(0, (count - 1) // unrolled, body, (first, empty))

    return run


def compiled_calls(
    function: Callable[..., Any],
    feedback: Mapping[int, int],
    count: int,
    operands: tuple[jax.Array, ...],
) -> Any:
    """The program of `repeated` calls on these operands."""
    lowered = jax.jit(repeated(function, feedback, count)).lower(*operands)
    return lowered.compile(compiler_options=IN_TURN)
