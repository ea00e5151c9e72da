"""Checks and times every kernel of `benchmarks.cases`."""

import concurrent.futures
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import CASES, checks
from benchmarks.cases.base import Problem, small
from benchmarks.common import interleaved, summary
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.sections import Clock
from benchmarks.shapes import ExpertShape

THREADS = 8  # XLA compiles without holding Python's lock
MOST_TOKENS_OF_EXPERTS = 128  # for 4,096 XLA's products of all tokens and experts need 17 GB


def copy_bandwidth(num_bytes: int, count: int, rounds: int) -> float:
    """Bytes per second, read plus written, of adding 1 to a large array in place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(value: jax.Array) -> jax.Array:
        def step(_: Any, value: jax.Array) -> jax.Array:
            return jax.lax.optimization_barrier(value + 1)

        return jax.lax.fori_loop(0, count, step, value)

    value = jax.block_until_ready(copies(jnp.zeros(num_bytes // 4, jnp.int32)))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        value = jax.block_until_ready(copies(value))
        seconds.append(time.perf_counter() - began)
    return 2 * value.nbytes * count / min(seconds)


def check_kernels(scale: Scale, clock: Clock) -> dict[str, Any]:
    """Relative errors of every kernel against float64, on shapes cut to two heads or groups.

    The second row of the batch has another tree, an empty path and a shorter cache.
    """

    def check(task: tuple) -> dict[str, Any] | None:
        nodes, dtype, name, shape, full = task
        what = {"kernel": name, "shape": shape, "nodes": nodes, "dtype": dtype}
        if not clock.fits(", ".join(map(str, what.values()))):
            return None
        case = CASES[name]
        problem = Problem(small(full), nodes, dtype, batch=2, capacity=scale.capacity)
        if reason := checks.refused(case, problem._replace(shape=full)):
            return what | {"refused": reason, "errors": {}, "right": True}
        found = checks.errors(case, problem, scale.implementations)
        right = all(checks.within_limits(case, dtype, errors) for errors in found.values())
        return what | {"errors": found, "right": right}

    tasks = [
        (nodes, dtype, name, shape, full)
        for nodes in scale.checked_nodes
        for dtype in ("bfloat16", "float32")
        for name, case in CASES.items()
        for shape, full in scale.shapes[case.kind].items()
    ]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        rows = [row for row in pool.map(check, tasks) if row is not None]
    return {"right": bool(rows) and all(row["right"] for row in rows), "rows": rows}


def time_kernels(scale: Scale, bandwidth: float, clock: Clock) -> list[dict[str, Any]]:
    """Microseconds of a call of each kernel, averaged over many calls in one program.

    With one sequence the operands stay in the L2 cache, and a call can be faster than the memory
    roofline; with many they do not.
    """
    rows = []
    for nodes in scale.timed["nodes"]:
        for shape in scale.timed["shapes"]:
            for size in scale.timed["batches"]:
                names = [
                    name
                    for name, case in CASES.items()
                    if case.timed
                    and shape in scale.shapes[case.kind]
                    and (case.kind is not ExpertShape or nodes * size <= MOST_TOKENS_OF_EXPERTS)
                ]
                if not names:
                    continue
                if clock.fits(f"{shape}, {nodes} nodes, batch of {size}"):
                    rows += _timed(scale, bandwidth, shape, nodes, size, names)
    return rows


def _timed(
    scale: Scale, bandwidth: float, shape: str, nodes: int, size: int, names: list[str]
) -> list[dict[str, Any]]:
    operands = {
        name: CASES[name].operands(
            Problem(scale.shapes[CASES[name].kind][shape], nodes, scale.dtype, size, scale.capacity)
        )
        for name in names
    }

    def compiled(key: tuple[str, str]) -> Any:
        name, implementation = key
        function = functools.partial(CASES[name].function, implementation=implementation)
        many = checks.repeated(function, CASES[name].feedback, scale.count)
        return jax.jit(many).lower(*operands[name]).compile()

    keys = [(name, implementation) for name in names for implementation in scale.implementations]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        programs = dict(zip(keys, pool.map(compiled, keys), strict=True))
    rows = []
    for name in names:
        calls = {
            implementation: functools.partial(wait, programs[name, implementation], operands[name])
            for implementation in scale.implementations
        }
        for call in calls.values():
            call()
        seconds = interleaved(calls, scale.rounds, lambda: None)
        microseconds = {
            implementation: summary([1e6 * value / scale.count for value in values])
            for implementation, values in seconds.items()
        }
        moved = checks.bytes_moved(CASES[name], operands[name])
        floor = 1e6 * moved / bandwidth
        fastest = microseconds[scale.implementations[-1]]["median"]
        rows.append(
            {
                "kernel": name,
                "shape": shape,
                "nodes": nodes,
                "batch": size,
                "microseconds": microseconds,
                "bytes": moved,
                "floor_microseconds": floor,
                "kernel_over_floor": fastest / floor,
                "xla_over_kernel": microseconds["xla"]["median"] / fastest,
            }
        )
    return rows


def wait(program: Any, operands: Sequence[Any]) -> None:
    """Runs a program and blocks."""
    jax.block_until_ready(program(*operands))
