"""What a case refuses, the bytes of a call, and repeated calls in one program."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases.base import Case, Problem, as_tuple

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
