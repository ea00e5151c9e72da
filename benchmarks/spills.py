"""Do the kernels spill registers on any GPU generation? Compiled for GPUs that are not there.

    JAX_PLATFORMS=cpu python -m benchmarks.spills [--kernels replay] [--gpus A100 H100]

What it needs is in `benchmarks/deviceless.py`. Results go to `benchmarks/results/spills.json`; a
run of some kernels or GPUs replaces those rows only; exit code 1 if anything spills.
"""

import argparse
import functools
import itertools
import json
from operator import itemgetter
from typing import Any

from benchmarks.deviceless import GPUS, Compiler  # first: sets XLA's flags

import jax  # isort: skip
from rich.progress import Progress

from benchmarks.common import RESULTS, merged, print_table, write_json
from benchmarks.kernels import ATTENTION_OPS, COMPILED, KERNELS, Problem, refused

NODES = (1, 13, 16, 64, 128)
CAPACITIES = (128, 4096)  # of the attention's cache: for one program, and shared among many
DTYPES = ("bfloat16", "float32")
REPLACED = ("kernel", "gpu", "nodes")  # rows that are the same in these are all of one run


def spills(compiler: Compiler, name: str, problem: Problem) -> bool:
    """Whether a kernel spills, given this problem."""
    kernel = KERNELS[name]
    operands = jax.eval_shape(functools.partial(kernel.operands, problem))
    function = jax.jit(functools.partial(kernel.function, implementation="pallas"))
    return compiler(function, *compiler.place(operands))[2]


def main() -> None:
    """Compiles every kernel for every shape, type and GPU."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kernels", nargs="+", choices=COMPILED, default=list(COMPILED))
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES))
    chosen = parser.parse_args()
    cases = [
        (name, shape, Problem(KERNELS[name].shapes[shape], nodes, dtype, capacity=capacity))
        for name in chosen.kernels
        for capacity in (CAPACITIES if name in ATTENTION_OPS else (0,))
        for shape, nodes, dtype in itertools.product(KERNELS[name].shapes, chosen.nodes, DTYPES)
    ]
    cases = [case for case in cases if refused(case[0], case[2]) is None]
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("compiling", total=len(cases) * len(chosen.gpus))
        for compiler in map(Compiler, chosen.gpus):
            for name, shape, problem in cases:
                row = dict(gpu=compiler.gpu, kernel=name, shape=shape)
                row |= dict(nodes=problem.nodes, dtype=problem.dtype)
                if problem.capacity:
                    row |= dict(capacity=problem.capacity)
                rows.append({**row, "spills": spills(compiler, name, problem)})
                progress.advance(task)
    file = RESULTS / "spills.json"
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    results = sorted(merged(earlier, rows, REPLACED), key=itemgetter(*REPLACED, "shape", "dtype"))
    path = write_json("spills", {"jax": jax.__version__, "rows": results})
    spilled = [row for row in rows if row["spills"]]
    print_table(
        f"{len(rows)} kernels compiled, {len(spilled)} spill",
        ("kernel", "gpu", "shape", "nodes", "type"),
        [(r["kernel"], r["gpu"], r["shape"], r["nodes"], r["dtype"]) for r in spilled],
    )
    print(
        json.dumps({"spills": {"kernels": len(rows), "spill": len(spilled), "results": str(path)}})
    )
    raise SystemExit(1 if spilled else 0)


if __name__ == "__main__":
    main()
