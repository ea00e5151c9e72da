"""What does XLA make of a decode step on a TPU? Compiled for TPUs that are not attached.

XLA compiles a call of the target, the prefill of a prompt and the decode loop from abstract
weights, and the texts of the programs are counted: operations (fusions, copies, prefetches) of a
layer of each kind, as programs with one more of them give them, and XLA's own estimate of cycles.
`--whole` compiles whole models, for their memory. Loops are those of models with one layer of each
kind, with a draft model of one layer or with Medusa heads, on the paper's tree A.

    python -m benchmarks.static.tpu [--presets mamba2-2.7b] [--tpus v5e ...] [--nodes 1 16]
        [--prompts 512] [--loops greedy sampled heads] [--whole]

`pip install libtpu` is all it needs. Results go to `static-tpu.json`, in `benchmarks/results` with
`--commit`; a run of some presets or TPUs replaces their rows only. Exit code 1 if a program
transfers to the host or sorts a vocabulary, if a step writes a weight in another layout or type,
or if a layer exceeds `--most`. Collectives are counted by `benchmarks.static.mesh --device v5e`.
"""

import functools
import importlib.metadata
import itertools
import json
import math
import time
from typing import Any

from benchmarks.static.deviceless import TPUS, compiled_for_tpu  # first: sets XLA's flags

import jax  # isort: skip
from flax import nnx

import stree_jax as st
from benchmarks import common
from benchmarks.static import gates, report
from benchmarks.static.hlo import Program
from benchmarks.static.layers import by_layer, shortened, with_layers
from benchmarks.static.programs import (
    SETTINGS,
    Call,
    abstract_model,
    decode_loop,
    read_prompt,
    verify_step,
)

LOOPS = ("greedy", "sampled", "heads")
LARGE = 2**20  # numbers of a weight that no copy must be made of
OPTIONS = {
    "--presets": ("mamba2-2.7b",),
    "--tpus": {"nargs": "+", "choices": [*TPUS], "default": ["v5e"]},
    "--nodes": gates.NUMBERS | {"default": [1, 16]},
    "--prompts": gates.NUMBERS,
    "--loops": {"nargs": "*", "choices": LOOPS, "default": [*LOOPS]},
    "--whole": {"action": "store_true"},
    "--most": gates.LIMITS | {"metavar": "KIND-COUNT=NUMBER"},
}
HELP = {
    "--prompts": "numbers of tokens to prefill",
    "--whole": "also compile whole models",
    "--most": "limits for a layer in a step, such as mamba2-operations=40 mamba2-cycles=90000",
}


def compiled(tpu: str, call: Call, *, in_loop: bool = False, once: bool = False) -> Program:
    """A program, compiled and counted; one that runs `once` a text may copy weights.

    The activations of its many tokens are as large as some weights, by chance.
    """
    arrays = () if once else (leaf for leaf in jax.tree.leaves(call[1:3]) if leaf.ndim > 1)
    weights = {leaf.size for leaf in arrays if leaf.size >= LARGE}
    return Program.of(compiled_for_tpu(tpu, *call), weights, in_loop=in_loop)


def loop(config: st.ModelConfig, how: str) -> Call:
    """A decode loop with a draft model of the last layer's kind, or with heads."""
    target = abstract_model(config, None)
    drafter: Any
    if how == "heads":
        heads = nnx.eval_shape(lambda: st.MedusaHeads(target, rngs=nnx.Rngs(0)))
        drafter = st.MedusaDrafter(target, heads)
    else:
        drafter = st.ModelDrafter(abstract_model(with_layers(config, config.kinds[-1:]), None))
    topology = st.TreeTopology.paper("A").level_order()
    return decode_loop(target, drafter, topology, sampled=how == "sampled", steps=1)


def whole(program: Program) -> dict[str, Any]:
    """The row of one program."""
    return {
        **program.counts,
        "temporary_bytes": program.memory["temporary"],
        "argument_bytes": program.memory["arguments"],
        "bytes_over_arguments": round(program.bytes, 3),
    }


def main() -> None:
    """Compiles everything asked for, prints its rows and writes JSON; exit code 1 at a limit."""
    options = common.read_options(common.parser_of(__doc__.splitlines()[0], OPTIONS, HELP))
    tables: dict[str, report.Rows] = {"steps": [], "prompts": [], "loops": []}
    failures: list[str] = []
    most: dict[str, float] = {}

    def add(table: str, row: dict[str, Any], programs: Any, seconds: float) -> None:
        found = {problem for program in programs for problem in program.problems}
        failures.extend(f"{row['preset']}, {row['tpu']}: {problem}" for problem in sorted(found))
        tables[table].append(row | {"problems": sorted(found), "seconds": round(seconds, 1)})
        print(json.dumps(tables[table][-1]), flush=True)

    kinds = (
        ("nodes", options.nodes, "steps", functools.partial(verify_step, steps=1)),
        ("positions", options.prompts, "prompts", read_prompt),
    )
    for name, tpu in itertools.product(options.presets, options.tpus):
        config, which = st.ModelConfig.preset(name), {"preset": name, "tpu": tpu}
        for unit, sizes, table, build in kinds:
            for size in sizes:
                start = time.monotonic()

                def program(config: st.ModelConfig, tpu=tpu, build=build, size=size) -> Program:
                    return compiled(tpu, build(config, size, None), once=build is read_prompt)

                row, programs = by_layer(config, program)
                if options.whole:
                    start = time.monotonic()
                    all_of_it = program(config)
                    row["whole"], programs = whole(all_of_it), (*programs, all_of_it)
                add(table, which | {unit: size} | row, programs, time.monotonic() - start)
                for kind, counts in row["layers"].items() if table == "steps" else ():
                    for count in ("operations", "copies", "cycles"):
                        key = f"{kind}-{count}"
                        most[key] = max(most.get(key, 0.0), counts[count])
        for how in options.loops:
            start = time.monotonic()
            step = compiled(tpu, loop(shortened(config), how), in_loop=True)
            row = which | {"loop": how} | whole(step) | {"kernels": dict(step.kernels)}
            add("loops", row, (step,), time.monotonic() - start)
    settings = SETTINGS | {"libtpu": importlib.metadata.version("libtpu")}
    path = options.output / "static-tpu.json"
    report.write(__doc__.splitlines()[0], settings, tables, path)
    programs = sum(map(len, tables.values()))
    common.conclude("static.tpu", programs=programs, most=most, results=str(path))
    gates.conclude(failures + gates.failures(most, options.most, {}, math.inf, 0))


if __name__ == "__main__":
    main()
