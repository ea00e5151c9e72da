"""Times every kernel of `benchmarks.cases`, and the device's memory."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import CASES
from benchmarks.cases.base import Problem
from benchmarks.cases.checks import bytes_moved, compiled_calls
from benchmarks.common import timed_calls
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tasks import Row, Task
from benchmarks.shapes import ExpertShape
from stree_jax.measuring.clock import summary

MOST_TOKENS_OF_EXPERTS = 128  # for 4,096 XLA's products of all tokens and experts need 17 GB


def bandwidth(scale: Scale) -> list[Task]:
    """Bandwidth of the device's memory, by adding 1 to a large array in place: the roofline."""

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(value: jax.Array) -> jax.Array:
        barrier = jax.lax.optimization_barrier
        return jax.lax.fori_loop(0, scale.count, lambda _, x: barrier(x + 1), value)

    def measure(_: None) -> Row:
        value = jnp.zeros(scale.copied // 4, jnp.int32)

        def copy() -> jax.Array:
            nonlocal value
            value = copies(value)
            return value

        seconds = timed_calls("copies", {"copy": copy}, scale.rounds)["copy"]
        read_and_written = 2 * scale.copied * scale.count
        return {"bytes_per_second": read_and_written / min(seconds), "copied": scale.copied}

    return [Task("copy", measure=measure)]


def times(scale: Scale) -> Iterator[Task]:
    """Microseconds of a call of each kernel and of XLA, averaged over many calls in one program.

    With one sequence the operands stay in the L2 cache, and a call can be faster than the memory
    roofline; with many they do not.
    """
    order = (scale.timed_batches, scale.timed_nodes, scale.timed_shapes, scale.cases)
    for size, nodes, shape, name in itertools.product(*order):
        case = CASES[name]
        too_large = nodes * size > MOST_TOKENS_OF_EXPERTS and case.kind is ExpertShape
        if shape not in scale.shapes[case.kind] or too_large:
            continue
        full = scale.shapes[case.kind][shape]
        problem = Problem(full, nodes, scale.dtype, size, scale.capacity)
        row = {"kernel": name, "shape": shape, "nodes": nodes, "batch": size}
        task = f"{name}, {shape}, {nodes} nodes, batch of {size}"
        prepare = functools.partial(_compiled, scale, name, problem)
        yield timing(task, scale, row, "microseconds", prepare)


def timing(task: str, scale: Scale, row: Row, unit: str, prepare: Callable[[], Any]) -> Task:
    """A task that times calls interleaved; `prepare` gives them and the bytes that one moves."""
    scales = {"microseconds": 1e6 / scale.count, "milliseconds": 1e3 / scale.steps}

    def measure(prepared: tuple[Mapping[str, Callable[[], Any]], Row]) -> Row:
        calls, moved = prepared
        taken = timed_calls(task, calls, scale.rounds, scales[unit])
        times = {name: summary(each) for name, each in taken.items()}
        return row | {"dtype": scale.dtype, unit: times} | moved

    return Task(task, prepare, measure)


def _compiled(scale: Scale, name: str, problem: Problem) -> tuple[dict[str, Any], Row]:
    case = CASES[name]
    operands = case.operands(problem)
    calls = {}
    for implementation in scale.implementations:
        function = functools.partial(case.function, implementation=implementation)
        program = compiled_calls(function, case.feedback, scale.count, operands)
        calls[implementation] = functools.partial(program, *operands)
    return calls, {"bytes": bytes_moved(case, operands)}
