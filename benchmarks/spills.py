"""Do the kernels spill registers on any generation of GPUs? Compiled for GPUs not attached.

    JAX_PLATFORMS=cpu python -m benchmarks.spills [--kernels replay] [--gpus A100 H100]

`benchmarks/static/deviceless.py` says what to install. Results go to `spills.json`, in
`benchmarks/results` with `--commit`; a run of some kernels or GPUs replaces their rows only. Exit
code 1 if anything spills.
"""

import argparse
import functools
import itertools
import json
from operator import itemgetter
from typing import Any

from benchmarks.static.deviceless import GPUS, Compiler  # first: sets XLA's flags

import jax  # isort: skip

from benchmarks.cases import CASES, COMPILED
from benchmarks.cases.base import Problem
from benchmarks.cases.checks import refused
from benchmarks.common import conclude, merged, print_table, progress_bar, read_options, write_json

NODES = (1, 13, 16, 64, 128)
CAPACITIES = (128, 4096)  # of the KV cache: for one split, and for many
DTYPES = ("bfloat16", "float32")
REPLACED = ("kernel", "gpu", "nodes")  # a run replaces all rows that agree in these


def spills(compiler: Compiler, name: str, problem: Problem) -> bool:
    """Whether the kernel of a case spills, given this problem."""
    case = CASES[name]
    operands = jax.eval_shape(functools.partial(case.operands, problem))
    function = jax.jit(functools.partial(case.function, implementation="pallas"))
    return compiler(function, *compiler.place(operands)).spills


def main() -> None:
    """Compiles every kernel for every shape, type and GPU."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kernels", nargs="+", choices=COMPILED, default=list(COMPILED))
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES))
    chosen = read_options(parser)
    cases = [
        (name, shape, Problem(CASES[name].shapes[shape], nodes, dtype, capacity=capacity))
        for name in chosen.kernels
        for capacity in (CAPACITIES if CASES[name].has_cache else (0,))
        for shape, nodes, dtype in itertools.product(CASES[name].shapes, chosen.nodes, DTYPES)
    ]
    cases = [case for case in cases if refused(CASES[case[0]], case[2]) is None]
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=len(cases) * len(chosen.gpus))
        for compiler in map(Compiler, chosen.gpus):
            for name, shape, problem in cases:
                row = dict(gpu=compiler.gpu, kernel=name, shape=shape)
                row |= dict(nodes=problem.nodes, dtype=problem.dtype)
                if problem.capacity:
                    row |= dict(capacity=problem.capacity)
                rows.append({**row, "spills": spills(compiler, name, problem)})
                progress.advance(task)
    file = chosen.output / "spills.json"
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    results = sorted(merged(earlier, rows, REPLACED), key=itemgetter(*REPLACED, "shape", "dtype"))
    path = write_json("spills", {"jax": jax.__version__, "rows": results}, chosen.output)
    spilled = [row for row in rows if row["spills"]]
    print_table(
        f"{len(rows)} kernels compiled, {len(spilled)} spill",
        ("kernel", "gpu", "shape", "nodes", "type"),
        [(r["kernel"], r["gpu"], r["shape"], r["nodes"], r["dtype"]) for r in spilled],
    )
    conclude("spills", passed=not spilled, kernels=len(rows), spill=len(spilled), results=str(path))


if __name__ == "__main__":
    main()
