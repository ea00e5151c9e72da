"""The search for block sizes: candidates, their times, and the choice among them."""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.cases import CASES
from benchmarks.cases.base import LIMITS, Case, Problem, as_tuple, relative_error
from benchmarks.cases.checks import compiled_calls, refused
from benchmarks.gpu.checks import APART
from benchmarks.gpu.kernels import timed
from benchmarks.gpu.scale import TINY
from benchmarks.gpu.spaces import SPACES
from benchmarks.gpu.tasks import Row, Section, Task
from benchmarks.gpu.worker import THREADS

DTYPES = ("bfloat16", "float32")
CAPACITY = 4096  # of the KV cache
GAIN = 0.98  # relative time below which a candidate replaces the best so far

Times = list[float | str]  # of candidates: microseconds, or why one is out


@dataclasses.dataclass(frozen=True)
class Timer:
    """How candidates are compiled and timed."""

    interpret: bool  # the kernels run in the interpreter
    count: int  # calls in one timed program
    rounds: int  # timed runs of each program

    def compiled(self, case: Case, operands: tuple, want: tuple, blocks: Any) -> Any:
        """The program of a candidate, or the reason why it is out."""
        function = functools.partial(case.with_blocks, blocks=blocks, interpret=self.interpret)
        try:
            got = as_tuple(jax.jit(function)(*operands))
            for value, wanted, output in zip(got, want, case.outputs, strict=True):
                error = relative_error(value, wanted)
                limit = APART * LIMITS[output, operands[0].dtype.name]
                if error > limit:
                    return f"wrong: {output} is off by {error:.1e}"
            return compiled_calls(function, case.feedback, self.count, operands)
        except Exception as error:  # too much shared memory, or another limit of Triton
            return f"failed: {error!s:.200}"

    def programs(self, case: Case, problem: Problem, candidates: Sequence[Any]) -> tuple:
        """Operands, and the program of each candidate."""
        operands = case.operands(problem)
        plain = functools.partial(case.function, implementation="xla")
        want = as_tuple(jax.jit(plain)(*operands))
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            compile_one = functools.partial(self.compiled, case, operands, want)
            return operands, list(pool.map(compile_one, candidates))

    def microseconds(self, operands: tuple, programs: Sequence[Any]) -> Times:
        """Median time of a call of each candidate, interleaved, or why it is out."""
        calls = {
            str(i): functools.partial(program, *operands)
            for i, program in enumerate(programs)
            if not isinstance(program, str)
        }
        found = timed(calls, self.rounds, 1e6 / self.count)
        return [
            program if isinstance(program, str) else found[str(i)]["median"]
            for i, program in enumerate(programs)
        ]


def search(options: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[Task]:
    """One task for each field of each case of a kernel; the first fields of all cases come first.

    A row has the best block sizes `so_far`, and all timings; the search resumes from the rows of
    an earlier run.
    """
    timer = Timer(options["smoke"], options["count"], options["rounds"])
    best: dict[tuple[str, str], Any] = {}
    turns = []
    for kernel in options["kernels"]:
        space = SPACES[kernel]
        cases: dict[str, list[tuple[str, Problem]]] = {}
        for shape, problem in problems_of(kernel, options):
            cases.setdefault(space.case(problem), []).append((shape, problem))
        fields = [name for name in space.values if name in (options["fields"] or space.values)]
        for case, members in cases.items():
            best[kernel, case] = space.defaults[case]
            turns.append([(kernel, case, members, field) for field in fields])
    for row in rows:
        if "so_far" in row:
            key = row["kernel"], row["case"]
            best[key] = type(best[key])(**row["so_far"])
    for turn in itertools.zip_longest(*turns):
        for step in filter(None, turn):
            kernel, case, _, field = step
            yield Task(
                f"{kernel}, {case}, {field}",
                functools.partial(_programs, timer, best, *step, options["smoke"]),
                functools.partial(_choose, timer, best, *step),
            )


def _programs(
    timer: Timer, best: dict, kernel: str, case: str, members: list, field: str, few: bool
) -> tuple[list, list]:
    """The candidates, the best so far first, and their programs for each problem."""
    chosen = best[kernel, case]
    values = SPACES[kernel].values[field][: 2 if few else None]
    others = [value for value in values if value != getattr(chosen, field)]
    candidates = [chosen, *(dataclasses.replace(chosen, **{field: value}) for value in others)]
    op = CASES[SPACES[kernel].timed]
    return candidates, [timer.programs(op, problem, candidates) for _, problem in members]


def _choose(
    timer: Timer, best: dict, kernel: str, case: str, members: list, field: str, prepared: tuple
) -> Row:
    candidates, programs = prepared
    times = [timer.microseconds(*of_problem) for of_problem in programs]
    best[kernel, case] = candidates[winner(times)]
    return {
        "kernel": kernel,
        "case": case,
        "field": field,
        "so_far": dataclasses.asdict(best[kernel, case]),
        "timed": [
            {"shape": shape, "nodes": problem.nodes, "dtype": problem.dtype}
            | {"blocks": dataclasses.asdict(blocks)}
            | ({"out": time} if isinstance(time, str) else {"microseconds": time})
            for (shape, problem), row in zip(members, times, strict=True)
            for blocks, time in zip(candidates, row, strict=True)
        ],
    }


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
        options: `nodes`, `dtypes`, `batch`, and `shapes` or None for all; `smoke` for tiny ones.
    """
    case = CASES[SPACES[kernel].timed]
    shapes = TINY[case.kind] if options["smoke"] else case.shapes
    capacity = 40 if options["smoke"] else CAPACITY
    problems = [
        (shape, Problem(shapes[shape], nodes, dtype, options["batch"], capacity))
        for shape, nodes, dtype in itertools.product(shapes, options["nodes"], options["dtypes"])
        if options["shapes"] is None or shape in options["shapes"]
    ]
    return [(shape, problem) for shape, problem in problems if not refused(case, problem)]


SECTIONS = {"tune": Section(search, 1.0, together=1, seconds=120.0)}
