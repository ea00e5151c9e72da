"""The search for block sizes: candidates, their times, and the choice among them."""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.cases import CASES
from benchmarks.cases.base import LIMITS, Case, Problem, as_tuple, relative_error
from benchmarks.cases.checks import compiled_calls, refused
from benchmarks.common import timed_calls
from benchmarks.gpu.scale import TINY, scale_of
from benchmarks.gpu.spaces import SPACES
from benchmarks.gpu.tasks import Row, Section, Task
from benchmarks.gpu.worker import THREADS

DTYPES = ("bfloat16", "float32")
GAIN = 0.98  # relative time below which a candidate replaces the best so far
# Two correct results may differ by more than the error of each against float64.
APART = 2.5

Times = list[float | str]  # of candidates: microseconds, or why one is out
Best = dict[tuple[str, str], Any]  # the best block sizes so far by kernel and case


class Step(NamedTuple):
    """A field of the block sizes of a case, which is tuned on several problems."""

    kernel: str
    case: str
    problems: list[tuple[str, Problem]]  # with the names of their shapes
    field: str


def search(options: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[Task]:
    """One task for each field of each case of a kernel; the first fields of all cases come first.

    A row has the best block sizes `so_far`, and all timings; the search resumes from the rows of
    an earlier run.
    """
    best: Best = {}
    turns = []
    for kernel in options["kernels"]:
        space = SPACES[kernel]
        cases: dict[str, list[tuple[str, Problem]]] = {}
        for shape, problem in problems_of(kernel, options):
            cases.setdefault(space.case(problem), []).append((shape, problem))
        for case, members in cases.items():
            best[kernel, case] = space.defaults[case]
            turns.append([Step(kernel, case, members, field) for field in space.values])
    for row in rows:
        if "so_far" in row:
            key = row["kernel"], row["case"]
            best[key] = type(best[key])(**row["so_far"])
    for step in filter(None, itertools.chain(*itertools.zip_longest(*turns))):
        yield Task(
            f"{step.kernel}, {step.case}, {step.field}",
            functools.partial(_candidates, options, best, step),
            functools.partial(_chosen, options, best, step),
        )


def _candidates(options: Mapping[str, Any], best: Best, step: Step) -> tuple[list, list]:
    """The candidates, the best so far first, and their programs for each problem."""
    space, chosen = SPACES[step.kernel], best[step.kernel, step.case]
    values = space.values[step.field][: 2 if options["smoke"] else None]
    others = [value for value in values if value != getattr(chosen, step.field)]
    candidates = [chosen, *(dataclasses.replace(chosen, **{step.field: each}) for each in others)]
    case = CASES[space.timed]
    return candidates, [programs(options, case, each, candidates) for _, each in step.problems]


def _chosen(options: Mapping[str, Any], best: Best, step: Step, prepared: tuple) -> Row:
    candidates, compiled = prepared
    times = [microseconds(options, *of_problem) for of_problem in compiled]
    best[step.kernel, step.case] = chosen = candidates[winner(times)]
    return {
        "kernel": step.kernel,
        "case": step.case,
        "field": step.field,
        "so_far": dataclasses.asdict(chosen),
        "timed": [
            {"shape": shape, "nodes": problem.nodes, "dtype": problem.dtype}
            | {"blocks": dataclasses.asdict(blocks)}
            | ({"out": time} if isinstance(time, str) else {"microseconds": time})
            for (shape, problem), row in zip(step.problems, times, strict=True)
            for blocks, time in zip(candidates, row, strict=True)
        ],
    }


def programs(
    options: Mapping[str, Any], case: Case, problem: Problem, candidates: Sequence[Any]
) -> tuple[tuple, list]:
    """Operands, and the program of each candidate or why it is out."""
    operands = case.operands(problem)
    want = as_tuple(jax.jit(functools.partial(case.function, implementation="xla"))(*operands))
    compile_one = functools.partial(program, options, case, operands, want)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return operands, list(pool.map(compile_one, candidates))


def program(
    options: Mapping[str, Any], case: Case, operands: tuple, want: tuple, blocks: Any
) -> Any:
    """The program of a candidate, or the reason why it is out: compared with `want`, XLA's."""
    function = functools.partial(case.with_blocks, blocks=blocks, interpret=options["smoke"])
    try:
        got = as_tuple(jax.jit(function)(*operands))
        for value, wanted, output in zip(got, want, case.outputs, strict=True):
            error = relative_error(value, wanted)
            if error > APART * LIMITS[operands[0].dtype.name][output]:
                return f"wrong: {output} is off by {error:.1e}"
        return compiled_calls(function, case.feedback, options["count"], operands)
    except Exception as error:  # too much shared memory, or another limit of Triton
        return f"failed: {error!s:.200}"


def microseconds(options: Mapping[str, Any], operands: tuple, programs: Sequence[Any]) -> Times:
    """Median time of a call of each candidate, interleaved, or why it is out."""
    calls = {
        i: functools.partial(program, *operands)
        for i, program in enumerate(programs)
        if not isinstance(program, str)
    }
    found = timed_calls("candidates", calls, options["rounds"], 1e6 / options["count"])
    return [float(np.median(found[i])) if i in found else out for i, out in enumerate(programs)]


def winner(times: Sequence[Times]) -> int:
    """The candidate to keep, given times by problem and candidate; the first is the best so far.

    The first is kept unless it is out, or another one is faster by the least gain.

    Raises:
        ValueError: every candidate is out for one of the problems.
    """
    means = [
        float("inf")
        if any(isinstance(time, str) for time in candidate)
        else float(np.exp(np.mean(np.log(candidate))))
        for candidate in zip(*times, strict=True)
    ]
    fastest = int(np.argmin(means))
    if np.isinf(means[fastest]):
        reasons = (time for row in times for time in row if isinstance(time, str))
        raise ValueError(f"all block sizes are out: {next(reasons)}")
    return fastest if means[fastest] < GAIN * means[0] else 0


def problems_of(kernel: str, options: Mapping[str, Any]) -> list[tuple[str, Problem]]:
    """The chosen shapes, dtypes and numbers of nodes that the kernel of an op accepts.

    Args:
        kernel: a key of `SPACES`.
        options: `nodes`, `dtypes`, and `shapes` or None for all; `smoke` for tiny ones.
    """
    case = CASES[SPACES[kernel].timed]
    shapes = TINY[case.kind] if options["smoke"] else case.shapes
    problems = [
        (shape, Problem(shapes[shape], nodes, dtype, capacity=scale_of(options).capacity))
        for shape, nodes, dtype in itertools.product(shapes, options["nodes"], options["dtypes"])
        if options["shapes"] is None or shape in options["shapes"]
    ]
    return [(shape, problem) for shape, problem in problems if not refused(case, problem)]


SECTIONS = {"tune": Section(search, 1.0, together=1, seconds=120.0)}
