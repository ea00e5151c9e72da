"""Which block sizes are the fastest for each Pallas kernel on this GPU?

One pass of coordinate descent from the defaults, a field at a time: the values of a field are timed
in turns on every shape and number of nodes of a case (the type of the inputs, mostly), each against
the XLA implementation's answer first. What is faster by at least 2 % (geometric mean over shapes)
is kept; a candidate that fails to compile, or is wrong anywhere, is out. One call is timed on the
device, as a share of many in one program.

    python -m benchmarks.tune [--kernels replay ...] [--nodes 16 64] [--batch 1] [--output DIR]

Writes `pallas_kernels/tuned/<device>.json`, which the kernels look up; what it has of other kernels
stays. All timings go to `benchmarks/results/tune-<device>.json`. `--interpret` tries the
program itself on a CPU, with tiny shapes; its times mean nothing, so it needs an `--output`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.progress import Progress

from benchmarks import kernels
from benchmarks.common import interleaved, machine, print_table, write_json
from benchmarks.kernels import ATTENTION_OPS, KERNELS, Problem
from benchmarks.models import on_gpu
from benchmarks.shapes import AttentionShape, ExpertShape, HeadShape, MixerShape
from pallas_kernels import dispatch, tuning
from pallas_kernels.best_token import config as head_config
from pallas_kernels.expert_mlps import config as expert_config
from pallas_kernels.gated_rms_norm import config as norm_config
from pallas_kernels.mamba2_tree import config as mixer_config
from pallas_kernels.replay import config as replay_config
from pallas_kernels.replay_tree_scan import config as fused_config
from pallas_kernels.ssd import config as ssd_config
from pallas_kernels.tree_attention import config as attention_config
from pallas_kernels.tree_attention.config import ONE_SHARE
from pallas_kernels.tree_conv1d import config as conv_config
from pallas_kernels.tree_scan import config as scan_config

DTYPES = ("bfloat16", "float32")
CAPACITY = 4096  # places of the attention's cache
SHORT = 128  # places of a cache that one program has for itself
GAIN = 0.98  # of the time so far, to be preferred to it
# Of two right answers: both are within the limits of the float64 reference.
FACTOR = 2.5

TINY = {
    MixerShape: {"tiny": MixerShape(2, 16, 16, 1)},
    AttentionShape: {"tiny": AttentionShape(4, 2, 16)},
    HeadShape: {"tiny": HeadShape(32, 100)},
    ExpertShape: {"tiny": ExpertShape(32, 16, 4, 2, True)},
}


class Space(NamedTuple):
    """Where to look for the block sizes of a kernel.

    Attributes:
        defaults: of each case.
        case: which of them a problem is.
        values: of each field, in the order in which they are tried.
        fixed: fields that are left as they are in a case.
    """

    defaults: Mapping[str, Any]
    case: Callable[[Problem], str]
    values: Mapping[str, tuple[int, ...]]
    fixed: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})


def _by_dtype(problem: Problem) -> str:
    return tuning.dtype_case(problem.dtype)


def _attention_case(problem: Problem) -> str:
    heads, groups, head_dim = problem.shape
    rows = problem.nodes * heads // groups
    name = attention_config.case(problem.dtype, rows, head_dim)
    blocks = attention_config.shared(
        attention_config.DEFAULTS[name],
        problem.dtype,
        num_rows=rows,
        num_groups=problem.batch * groups,
        capacity=problem.capacity,
        head_dim=head_dim,
    )
    return ONE_SHARE if blocks is None else name


def _norm_case(problem: Problem) -> str:
    return norm_config.case(problem.shape.num_heads * problem.shape.head_dim)


_WARPS = {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3)}
_STATE = (16 * 128, 32 * 128, 64 * 128)
_FUSED = {
    "state": _STATE,
    "queries": (16, 32, 64),
    "keys": (16, 32, 64),
    "replayed": (16, 32, 64),
    "part": (32, 64, 128),
} | _WARPS
_ATTENTION = Space(
    attention_config.DEFAULTS,
    _attention_case,
    {"busy_warps": (512, 1024, 2048, 4096), "keys": (32, 64, 128), "rows": (16, 32, 64)} | _WARPS,
    {ONE_SHARE: ("busy_warps",)},
)
SPACES = {
    "tree_scan": Space(
        scan_config.DEFAULTS,
        _by_dtype,
        {"queries": (16, 32, 64), "keys": (16, 32, 64), "state": (32, 64, 128)} | _WARPS,
    ),
    "replay": Space(
        replay_config.DEFAULTS, _by_dtype, {"state": _STATE, "nodes": (16, 32, 64)} | _WARPS
    ),
    "replay_tree_scan": Space(fused_config.DEFAULTS, _by_dtype, _FUSED),
    "mamba2_tree": Space(
        mixer_config.DEFAULTS,
        lambda problem: mixer_config.case(problem.dtype, problem.shape.state_size),
        _FUSED,
    ),
    "ssd": Space(
        ssd_config.DEFAULTS,
        _by_dtype,
        {"state": _STATE, "positions": (16, 32, 64), "part": (32, 64, 128)} | _WARPS,
    ),
    "tree_attention": _ATTENTION,
    "attention_tree": _ATTENTION,
    "best_token": Space(
        head_config.DEFAULTS,
        _by_dtype,
        {"words": (64, 128, 256), "inner": (32, 64, 128), "rows": (16, 32, 64)}
        | {"num_warps": (4, 8), "num_stages": (2, 3, 4)},
    ),
    "expert_mlps": Space(
        expert_config.DEFAULTS,
        _by_dtype,
        {"rows": (16, 32, 64), "columns": (32, 64, 128), "inner": (32, 64, 128)}
        | {"num_warps": (4, 8), "num_stages": (2, 3, 4)},
    ),
    "gated_rms_norm": Space(
        norm_config.DEFAULTS,
        _norm_case,
        {"block": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)},
    ),
    "tree_conv1d": Space(
        conv_config.DEFAULTS,
        lambda _: "any",
        {"channels": (64, 128, 256, 512), "queries": (16, 32), "num_warps": (1, 2, 4, 8)},
    ),
}


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

    def compiled(self, name: str, operands: tuple, want: tuple, blocks: Any) -> Any:
        """The program of a candidate, or what is wrong with it."""
        kernel = KERNELS[name]
        function = functools.partial(kernel.with_blocks, blocks=blocks, interpret=self.interpret)
        try:
            got = kernels.as_tuple(jax.jit(function)(*operands))
            for value, wanted, output in zip(got, want, kernel.outputs, strict=True):
                error = kernels.relative_error(value, wanted)
                limit = FACTOR * kernels.LIMITS[output, operands[0].dtype.name]
                if error > limit:
                    return f"wrong: {output} is off by {error:.1e}"
            many = kernels.repeated(function, kernel.feedback, self.count)
            return jax.jit(many).lower(*operands).compile()
        except Exception as error:  # too much shared memory, or whatever Triton does not like
            return f"failed: {error!s:.200}"

    def microseconds(
        self, name: str, problem: Problem, candidates: Sequence[Any]
    ) -> list[float | str]:
        """Median time of a call of each candidate, timed in turns, or why it is out."""
        operands = KERNELS[name].operands(problem)
        plain = functools.partial(KERNELS[name].function, implementation="xla")
        want = kernels.as_tuple(jax.jit(plain)(*operands))
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            compile_one = functools.partial(self.compiled, name, operands, want)
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
    """The best block sizes of one kernel by case, and everything that was timed.

    Args:
        name: of the kernel.
        problems: with the names of their shapes; a case without any is left out.
        timer: how to time.
        values: to try of each field; None: those of `SPACES`.
        progress: shows how far it is.
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
            if field in space.fixed.get(case, ()):
                continue
            others = [value for value in options if value != getattr(chosen, field)]
            candidates = [
                chosen,
                *(dataclasses.replace(chosen, **{field: value}) for value in others),
            ]
            times = []
            for shape, problem in members:
                times.append(timer.microseconds(name, problem, candidates))
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
    """The candidate to keep, given times by problem and candidate; the first is the one so far.

    Raises:
        ValueError: the one so far does not run, or is wrong, so that there is nothing to compare.
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


def write_table(
    directory: Path, where: Mapping[str, Any], blocks: dict[str, dict[str, Any]]
) -> Path:
    """Writes the block sizes of some kernels; those of others in the same table stay."""
    path = directory / tuning.path_of(where["device"]).name
    kept = {}
    if path.exists():
        tuning.load(path)  # an error if it is damaged, rather than an overwritten file
        kept = json.loads(path.read_text())["blocks"]
    directory.mkdir(parents=True, exist_ok=True)
    table = {
        "device": where["device"],
        "written_by": "python -m benchmarks.tune",
        **{key: where[key] for key in ("jax", "date", "commit")},
        "blocks": dict(sorted((kept | blocks).items())),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=1) + "\n")
    partial.rename(path)
    tuning.load.cache_clear()
    tuning.load(path)
    return path


def problems_of(
    name: str, nodes: Sequence[int], batch: int, *, tiny: bool
) -> list[tuple[str, Problem]]:
    """All shapes, types and numbers of nodes that a kernel takes."""
    shapes = TINY[kernels.kind_of_shapes(name)] if tiny else KERNELS[name].shapes
    capacity = 40 if tiny else CAPACITY
    problems = [
        (shape, Problem(shapes[shape], count, dtype, batch, capacity))
        for shape, count, dtype in itertools.product(shapes, nodes, DTYPES)
    ]
    if name in ATTENTION_OPS and not tiny:
        problems += [
            (shape, problem._replace(capacity=SHORT))
            for shape, problem in problems
            if problem.dtype == "bfloat16"  # float32 has no blocks for one share
        ]
    return [(shape, problem) for shape, problem in problems if not kernels.refused(name, problem)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Tunes the chosen kernels and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--nodes", nargs="+", type=int, default=(16, 64))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--count", type=int, default=50, help="calls in one timed program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="directory of the table, and of the timings")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, on any device")
    options = parser.parse_args(arguments)
    if options.interpret and options.output is None:
        parser.error("times of the interpreter mean nothing: --interpret needs an --output")
    if not options.interpret and (not on_gpu() or dispatch.device_obstacle()):
        raise SystemExit(
            f"nothing to tune: {dispatch.device_obstacle()}; --interpret tries the program itself"
        )
    where = machine()
    timer = Timer(options.interpret, options.count, options.rounds)
    directory = options.output or tuning.DIRECTORY
    blocks: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        for name in options.kernels:
            problems = problems_of(name, options.nodes, options.batch, tiny=options.interpret)
            values = None
            if options.interpret:  # two values of a field, to see that the program works
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
    print_table(
        f"Block sizes on {where['device']}",
        ("kernel", "case", "block sizes"),
        [
            (name, case, ", ".join(f"{field} {value}" for field, value in best.items()))
            for name, cases in blocks.items()
            for case, best in cases.items()
        ],
    )
    left_out = sum("out" in row for row in rows)
    print(
        json.dumps(
            {
                "tune": {
                    "timed": len(rows) - left_out,
                    "failed_or_wrong": left_out,
                    "table": str(table),
                    "results": str(path),
                }
            }
        )
    )


if __name__ == "__main__":
    main()
