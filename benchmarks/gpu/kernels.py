"""Times every kernel of `benchmarks.cases`, and the device's memory."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import CASES
from benchmarks.cases.base import Problem
from benchmarks.cases.checks import bytes_moved, compiled_calls
from benchmarks.common import interleaved, summary
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.tasks import Row, Task
from benchmarks.shapes import ExpertShape
from pallas_kernels.tree_scan import config as scan_config

MOST_TOKENS_OF_EXPERTS = 128  # for 4,096 XLA's products of all tokens and experts need 17 GB
HALF_HEADS = "half heads"
_SCANS = ("tree_scan", "replay_tree_scan")


def timed(calls: Mapping[str, Callable[[], Any]], rounds: int, unit: float) -> dict[str, Any]:
    """Median and quartiles of the time of each call, interleaved, in seconds times `unit`."""
    waiting = {
        name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()
    }
    for call in waiting.values():
        call()
    seconds = interleaved(waiting, rounds, lambda: None)
    return {name: summary([unit * value for value in values]) for name, values in seconds.items()}


def bandwidth(scale: Scale) -> list[Task]:
    """Bandwidth of the device's memory, by adding 1 to a large array in place: the roofline."""

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(value: jax.Array) -> jax.Array:
        def step(_: Any, value: jax.Array) -> jax.Array:
            return jax.lax.optimization_barrier(value + 1)

        return jax.lax.fori_loop(0, scale.count, step, value)

    def measure(_: None) -> Row:
        value = jax.block_until_ready(copies(jnp.zeros(scale.copied // 4, jnp.int32)))
        seconds = []
        for _ in range(scale.rounds):
            began = time.perf_counter()
            value = jax.block_until_ready(copies(value))
            seconds.append(time.perf_counter() - began)
        read_and_written = 2 * value.nbytes * scale.count
        return {"bytes_per_second": read_and_written / min(seconds), "copied": scale.copied}

    return [Task("copy", measure=measure)]


def times(scale: Scale) -> list[Task]:
    """Microseconds of a call of each kernel and of XLA, averaged over many calls in one program.

    With one sequence the operands stay in the L2 cache, and a call can be faster than the memory
    roofline; with many they do not.
    """
    tasks = []
    order = (scale.timed_batches, scale.timed_nodes, scale.timed_shapes, scale.cases)
    for size, nodes, shape, name in itertools.product(*order):
        case = CASES[name]
        too_large = nodes * size > MOST_TOKENS_OF_EXPERTS and case.kind is ExpertShape
        if not case.timed or shape not in scale.shapes[case.kind] or too_large:
            continue
        full = scale.shapes[case.kind][shape]
        problem = Problem(full, nodes, scale.dtype, size, scale.capacity)
        row = {"kernel": name, "shape": shape, "nodes": nodes, "batch": size}
        task = Task(
            f"{name}, {shape}, {nodes} nodes, batch of {size}",
            functools.partial(_compiled, scale, name, problem),
            functools.partial(_timed, scale, row),
        )
        tasks.append(task)
    return tasks


def contenders(scale: Scale, name: str, problem: Problem) -> dict[str, Callable[..., Any]]:
    """XLA, the kernel, and the other layout of a scan that does not spill.

    With the default block sizes a program owns a whole head; with the others half of one, so that
    there are twice as many programs and each keeps half of the registers.
    """
    case = CASES[name]
    found = {
        implementation: functools.partial(case.function, implementation=implementation)
        for implementation in scale.implementations
    }
    if name in _SCANS:
        numbers = problem.shape.head_dim * problem.shape.state_size
        whole = scan_config.DEFAULTS[scan_config.case(problem.dtype, numbers)]
        half = dataclasses.replace(whole, state=numbers // 2, num_warps=4)
        found[HALF_HEADS] = functools.partial(
            case.with_blocks, blocks=half, interpret=scale.interpret
        )
    return found


def _compiled(scale: Scale, name: str, problem: Problem) -> tuple[int, dict[str, Any]]:
    """Bytes moved, and the timed call of each contender, or how it failed."""
    case = CASES[name]
    operands = case.operands(problem)
    calls: dict[str, Any] = {}
    for contender, function in contenders(scale, name, problem).items():
        try:
            program = compiled_calls(function, case.feedback, scale.count, operands)
        except Exception as error:  # the others are timed
            calls[contender] = f"failed: {error!s:.300}"
        else:
            calls[contender] = functools.partial(program, *operands)
    return bytes_moved(case, operands), calls


def _timed(scale: Scale, row: Row, prepared: tuple[int, Mapping[str, Any]]) -> Row:
    moved, calls = prepared
    row = row | {"dtype": scale.dtype, "bytes": moved}
    runs = {name: call for name, call in calls.items() if callable(call)}
    if len(runs) < len(calls):
        failed = (f"{name} {call}" for name, call in calls.items() if name not in runs)
        row["failed"] = "; ".join(failed)
    return row | {"microseconds": timed(runs, scale.rounds, 1e6 / scale.count)}
