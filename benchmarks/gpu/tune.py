"""Which block sizes are the fastest for each Pallas kernel on this GPU?

One pass of coordinate descent from the defaults, the fields that matter most first. The values of a
field are checked against the result of XLA, and timed in turns on every shape and number of nodes
of a case (mostly the dtype of the inputs). A value is kept if it is faster by at least 2 %
(geometric mean over shapes). One that fails to compile, or is wrong anywhere, is skipped and
counted. The time of a call is averaged over many calls in one program.

    python -m benchmarks.tune --minutes 8.5 --output DIR --dtypes bfloat16 \
        --kernels tree_scan tree_conv1d tree_attention_layer --shapes mamba2-2.7b MambaInLlama-8B

<<<<<<< HEAD
Writes `<device>.json`, the table of the best block sizes so far, after every field, by default to
`pallas_kernels/tuned`, where the kernels read it; its entries for other kernels stay. All timings
are in `tune.json` in the same DIR. It runs in a process of its own: one that crashes or hangs loses
the field in progress. The same command again goes on where it ended. `--smoke` runs everything on
any device with tiny shapes; its times mean nothing, so it needs an `--output`.
=======
Writes `pallas_kernels/tuned/<device>.json`, which the kernels read; its entries for other kernels
stay. With `--output` the table goes there instead. All timings go to `tune-<device>.json`, in
`benchmarks/results` with `--commit`. `--interpret` runs everything on a CPU with tiny shapes; its
times mean nothing, so it needs an `--output`.
>>>>>>> main
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
<<<<<<< HEAD
from benchmarks.common import conclude, print_table
from benchmarks.gpu.runner import NoGpu, Results, run_section
from benchmarks.gpu.search import DTYPES
=======
from benchmarks.cases.base import LIMITS, Case, Problem, as_tuple, relative_error
from benchmarks.cases.checks import refused, repeated
from benchmarks.common import (
    OUTPUT,
    conclude,
    interleaved,
    machine,
    print_table,
    progress_bar,
    read_options,
    write_json,
)
from benchmarks.gpu.scale import TINY
>>>>>>> main
from benchmarks.gpu.spaces import SPACES
from benchmarks.gpu.tasks import Row
from pallas_kernels import tuning

LAST = 0.85  # of the time in which fields may begin
SECTION = "tune"


<<<<<<< HEAD
def blocks_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The best block sizes so far by kernel and case."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "so_far" in row:
            found.setdefault(row["kernel"], {})[row["case"]] = row["so_far"]
    return found
=======
@dataclasses.dataclass(frozen=True)
class Timer:
    """How candidates are compiled and timed.

    Attributes:
        interpret: run the kernels by the interpreter.
        count: calls in one timed program.
        rounds: timed programs of each candidate.
    """

    interpret: bool
    count: int
    rounds: int

    def compiled(self, case: Case, operands: tuple, want: tuple, blocks: Any) -> Any:
        """The program of a candidate, or what is wrong with it."""
        function = functools.partial(case.with_blocks, blocks=blocks, interpret=self.interpret)
        try:
            got = as_tuple(jax.jit(function)(*operands))
            for value, wanted, output in zip(got, want, case.outputs, strict=True):
                error = relative_error(value, wanted)
                limit = FACTOR * LIMITS[output, operands[0].dtype.name]
                if error > limit:
                    return f"wrong: {output} is off by {error:.1e}"
            many = repeated(function, case.feedback, self.count)
            return jax.jit(many).lower(*operands).compile()
        except Exception as error:  # too much shared memory, or another limit of Triton
            return f"failed: {error!s:.200}"

    def microseconds(
        self, case: Case, problem: Problem, candidates: Sequence[Any]
    ) -> list[float | str]:
        """Median time of a call of each candidate, timed in turns, or why it is out."""
        operands = case.operands(problem)
        plain = functools.partial(case.function, implementation="xla")
        want = as_tuple(jax.jit(plain)(*operands))
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            compile_one = functools.partial(self.compiled, case, operands, want)
            programs = list(pool.map(compile_one, candidates))
        calls = {
            str(i): functools.partial(_run, program, operands)
            for i, program in enumerate(programs)
            if not isinstance(program, str)
        }
        for call in calls.values():
            call()
        seconds = interleaved(calls, self.rounds, lambda: None)
        return [
            program
            if isinstance(program, str)
            else 1e6 * float(np.median(seconds[str(i)])) / self.count
            for i, program in enumerate(programs)
        ]


def _run(program: Any, operands: tuple) -> None:
    jax.block_until_ready(program(*operands))


def tune(
    name: str,
    problems: Sequence[tuple[str, Problem]],
    *,
    timer: Timer,
    values: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """The best block sizes of one kernel by case, and all timings.

    Args:
        name: of the op.
        problems: with the names of their shapes; a case without problems is left out.
        timer: how to time.
        values: to try for each field; None: all of `SPACES`.
        progress: a bar for it.
    """
    progress = progress or Progress(disable=True)
    space = SPACES[name]
    values = space.values if values is None else values
    cases: dict[str, list[tuple[str, Problem]]] = {}
    for shape, problem in problems:
        cases.setdefault(space.case(problem), []).append((shape, problem))
    task = progress.add_task(name, total=len(values) * len(problems))
    best, rows = {}, []
    for case, members in cases.items():
        chosen = space.defaults[case]
        for field, options in values.items():
            others = [value for value in options if value != getattr(chosen, field)]
            candidates = [
                chosen,
                *(dataclasses.replace(chosen, **{field: value}) for value in others),
            ]
            times = []
            for shape, problem in members:
                times.append(timer.microseconds(CASES[space.timed], problem, candidates))
                rows += [
                    {"kernel": name, "case": case, "shape": shape, "nodes": problem.nodes}
                    | {"dtype": problem.dtype, "blocks": dataclasses.asdict(blocks)}
                    | ({"out": time} if isinstance(time, str) else {"microseconds": time})
                    for blocks, time in zip(candidates, times[-1], strict=True)
                ]
                progress.advance(task)
            chosen = candidates[winner(times)]
        best[case] = dataclasses.asdict(chosen)
    return best, rows


def winner(times: Sequence[Sequence[float | str]]) -> int:
    """The candidate to keep, given times by problem and candidate; the first is the best so far.

    Raises:
        ValueError: the first does not run, or is wrong: there is nothing to compare with.
    """
    for row in times:
        if isinstance(row[0], str):
            raise ValueError(f"the block sizes that tuning starts from are out: {row[0]}")
    ratios = []
    for candidate in zip(*times, strict=True):
        if any(isinstance(time, str) for time in candidate):
            ratios.append(float("inf"))
        else:
            first = [row[0] for row in times]
            ratios.append(float(np.exp(np.mean(np.log(np.divide(candidate, first))))))
    fastest = int(np.argmin(ratios))
    return fastest if ratios[fastest] < GAIN else 0
>>>>>>> main


def write_table(
    directory: Path, where: Mapping[str, Any], blocks: dict[str, dict[str, Any]]
) -> Path:
<<<<<<< HEAD
    """Writes the block sizes of some cases of kernels; the table keeps those of others."""
=======
    """Writes the block sizes of some kernels; the table keeps the others."""
>>>>>>> main
    path = directory / tuning.path_of(where["device"]).name
    kept: dict[str, dict[str, Any]] = {}
    if path.exists():
        tuning.load.cache_clear()
        tuning.load(path)  # a damaged table is an error, and is not overwritten
        kept = json.loads(path.read_text())["blocks"]
    merged = kept | {op: kept.get(op, {}) | cases for op, cases in blocks.items()}
    directory.mkdir(parents=True, exist_ok=True)
    table = {
        "device": where["device"],
        "written_by": "python -m benchmarks.tune",
        **{key: where[key] for key in ("jax", "date", "commit")},
        "blocks": dict(sorted(merged.items())),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=1) + "\n")
    partial.rename(path)
    tuning.load.cache_clear()
    tuning.load(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Tunes the chosen kernels, and writes the table after each field."""
    began = time.monotonic()
    known = sorted({shape for space in SPACES.values() for shape in CASES[space.timed].shapes})
    fields = sorted({field for space in SPACES.values() for field in space.values})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--shapes", nargs="+", choices=known, help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--fields", nargs="+", choices=fields, help="default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything")
    parser.add_argument("--nodes", nargs="+", type=int, default=[64, 1])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--count", type=int, default=49, help="calls in one timed program")
    parser.add_argument("--rounds", type=int, default=7)
<<<<<<< HEAD
    parser.add_argument("--output", type=Path, help="directory of the table, and of the timings")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    options = parser.parse_args(arguments)
    if options.smoke and options.output is None:
        parser.error("times of the interpreter mean nothing: --smoke needs an --output")
    directory = options.output or tuning.DIRECTORY
    of_timings = options.output or Path(tempfile.mkdtemp(prefix="stree-tune-"))
    same = ("nodes", "batch", "count", "smoke", "shapes", "dtypes")
    settings = {name: getattr(options, name) for name in same}
    chosen = {name: getattr(options, name) for name in ("kernels", "fields", "rounds")}
    head = {"question": __doc__.splitlines()[0]} | settings
    try:
        results = Results(of_timings / "tune.json", head)
        note = results.section(SECTION)
        write = functools.partial(_write, directory, results)
        left = began + 60 * options.minutes - time.monotonic()
        run_section(
            *(results, SECTION, LAST * left, left),
            settings | chosen,
            module="benchmarks.gpu.search",
            changed=write,
        )
    except NoGpu as error:
        raise SystemExit(f"nothing to tune: {error}; --smoke tries it with tiny shapes") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
    table = write()
=======
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, on any device")
    options = read_options(parser, arguments)
    own_folder = not options.commit and options.output != OUTPUT
    if options.interpret and not own_folder:
        parser.error("times of the interpreter mean nothing: --interpret needs an --output")
    if not options.interpret and (not on_gpu() or dispatch.device_obstacle()):
        raise SystemExit(
            f"nothing to tune: {dispatch.device_obstacle()}; --interpret tries it with tiny shapes"
        )
    where = machine()
    timer = Timer(options.interpret, options.count, options.rounds)
    directory = options.output if own_folder else tuning.DIRECTORY
    blocks: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        for name in options.kernels:
            problems = problems_of(name, options.nodes, options.batch, tiny=options.interpret)
            values = None
            if options.interpret:  # two values of a field are enough to try the program
                values = {field: few[:2] for field, few in SPACES[name].values.items()}
            blocks[name], timed = tune(
                name, problems, timer=timer, values=values, progress=progress
            )
            rows += timed
            table = write_table(directory, where, blocks)
    results = {
        "question": __doc__.splitlines()[0],
        "machine": where,
        "batch": options.batch,
        "interpreted": options.interpret,
        "rows": rows,
    }
    path = write_json(f"tune-{table.stem}", results, options.output)
>>>>>>> main
    print_table(
        f"Block sizes on {results.data['machine']['device']}",
        ("kernel", "case", "block sizes"),
        [
            (kernel, case, ", ".join(f"{field} {value}" for field, value in best.items()))
            for kernel, cases in blocks_of(note["rows"]).items()
            for case, best in cases.items()
        ],
    )
    timed = [one for row in note["rows"] for one in row.get("timed", ())]
    out = [one["out"] for one in timed if "out" in one]
    failed = [f"{row['task']}: {row['failed']}" for row in note["rows"] if "failed" in row]
    for why in (*out, *failed):
        print(f"skipped: {why}"[:300])
    conclude(
        "tune",
        passed=table is not None,
        state=note["state"],
        timed=len(timed) - len(out),
        failed_or_wrong=len(out) + len(failed),
        left_out=len(note.get("left_out", [])),
        table=table and str(table),
        results=str(results.path),
    )


def _write(directory: Path, results: Results) -> Path | None:
    """The table, if there is anything to write in it."""
    blocks = blocks_of(results.section(SECTION)["rows"])
    return write_table(directory, results.data["machine"], blocks) if blocks else None
