"""How many kernels is a decode step on a GPU, and how much memory? Compiled for GPUs not attached.

XLA compiles a verify step (replay, tree forward, best tokens), the prefill of a prompt and the
whole decode loop from abstract weights; its own reports give kernels and memory. Programs with one
more layer of a kind give the launches of such a layer, and those of a model are the sum. Memory is
not such a sum: `--whole` compiles whole models.

    python -m benchmarks.static [--presets mamba2-2.7b] [--gpus H100 A100 ...] [--nodes 16 64]
        [--prompts 512] [--whole]

`benchmarks/static/deviceless.py` says what to install. Results go to `static.json`, in
`benchmarks/results` with `--commit`; a run of some presets or GPUs replaces their rows only. Exit
code 1 if a kernel spills registers, if our kernels exceed `--most-launches`, `--most-outside` or
`--most-growth`, or if a loop is not what `--one-graph` asks for.

Matrix products are not autotuned, since there is no device to time them on: counts of kernels and
memory hold, but a device may choose other blocks. XLA may also split the inner axis of small
products and add up the parts in another launch; rows with `products` "whole" are compiled without
that (`xla_gpu_experimental_force_split_k=1`).
"""

import functools
import itertools
import json
import math
from collections import Counter
from typing import Any

from benchmarks.static.deviceless import (
    GPUS,
    PRODUCTS,
    WEIGHTS,
    Compiler,
)  # first: sets XLA's flags

import stree_jax as st  # isort: skip
from benchmarks import common
from benchmarks.static import gates, report
from benchmarks.static.layers import by_layer, outside_of_layers, shortened
from benchmarks.static.programs import (
    SETTINGS,
    STEPS,
    GivenDrafts,
    abstract_model,
    decode_loop,
    read_prompt,
    verify_step,
)
from benchmarks.static.thunks import Program, Thunks, num_loops
from benchmarks.steps import binary_tree

OPTIONS = {
    "--presets": ("mamba2-2.7b",),
    "--gpus": common.names(GPUS),
    "--nodes": gates.NUMBERS | {"default": [16, 64]},
    "--prompts": gates.NUMBERS,
    "--implementations": common.names(("xla", "pallas")),
    "--products": common.names(PRODUCTS),
    "--weights": {"nargs": "+", "choices": [*WEIGHTS], "default": ["bfloat16"]},
    "--whole": {"action": "store_true"},
    "--loop-nodes": gates.NUMBERS | {"default": [64]},
    "--draft": None,
    "--one-graph": {"action": "store_true"},
    "--most-launches": gates.LIMITS,
    "--most-outside": gates.LIMITS,
    "--most-growth": {"type": float, "default": math.inf, "metavar": "PERCENT"},
}
HELP = {
    "--prompts": "numbers of tokens to prefill",
    "--whole": "also compile whole models",
    "--loop-nodes": "nodes of the trees of loops whose launches outside of layers are counted",
    "--draft": "preset of a draft model, whose layers are counted in a call with a chain of 4",
    "--one-graph": "the body of each loop must be one graph that XLA captures, so that nothing in a"
    " step waits for the host",
    "--most-launches": "limits for a layer with our kernels, products whole, such as mamba2=5"
    " attention=5; prompt-mamba2=11 for the prefill of a prompt, draft-mamba2=12 for a draft model",
    "--most-outside": "limits for a step of the loop outside of layers, such as greedy=30"
    " sampled=40",
    "--most-growth": "limit for the memory of a whole step (arguments, results and temporary"
    " memory) with our kernels, products whole, from the smallest of --nodes to the largest",
}


def step_of(compiler: Compiler, implementation: str, nodes: int, config: st.ModelConfig) -> Program:
    """Calls of a target."""
    compiled = compiler(*verify_step(config, nodes, implementation, compiler.weights))
    return Program.of(compiled, Thunks.parse(compiled.thunks).outside, STEPS)


def prefill_of(
    compiler: Compiler, implementation: str, positions: int, config: st.ModelConfig
) -> Program:
    """The prefill of a prompt; of a loop over chunks, launches times its trip count."""
    compiled = compiler(*read_prompt(config, positions, implementation, compiler.weights))
    outside, inside = Thunks.parse(compiled.thunks)
    if loops := num_loops(outside):
        # One per Mamba-2 layer; XLA removes loops of a single trip.
        assert config.mamba2 is not None
        assert loops == sum(kind in ("mamba2", "parallel") for kind in config.kinds)
        inside *= -(-positions // config.mamba2.chunk_size)
    return Program.of(compiled, outside + inside)


def loop_of(
    compiler: Compiler, implementation: str, nodes: int, config: st.ModelConfig, *, sampled: bool
) -> Program:
    """A step of the loop on a full binary tree, with drafts of no cost."""
    target = abstract_model(config, implementation, compiler.weights)
    call = decode_loop(target, GivenDrafts(), binary_tree(nodes), sampled=sampled)
    compiled = compiler(*call)
    return Program.of(compiled, Thunks.parse(compiled.thunks).inside, STEPS)


def call_of(
    compiler: Compiler, implementation: str, target: st.ModelConfig, draft: st.ModelConfig
) -> Program:
    """A step of the loop with a chain of 4 of a draft model."""
    models = (
        abstract_model(config, implementation, compiler.weights) for config in (target, draft)
    )
    target_model, draft_model = models
    drafter, chain = st.ModelDrafter(draft_model), st.TreeTopology.chain(4)
    compiled = compiler(*decode_loop(target_model, drafter, chain, sampled=False))
    return Program.of(compiled, Thunks.parse(compiled.thunks).inside, STEPS)


def main() -> None:
    """Compiles everything asked for, prints its rows and writes JSON; exit code 1 at a limit."""
    parser = common.parser_of(__doc__.splitlines()[0], OPTIONS, HELP)
    options = common.read_options(parser)
    if options.most_growth < math.inf and not (options.whole and len(options.nodes) > 1):
        parser.error("--most-growth compares whole models: add --whole and two numbers of --nodes")
    compilers = [
        Compiler(*each)
        for each in itertools.product(options.gpus, options.products, options.weights)
    ]
    tables: dict[str, report.Rows] = {"steps": [], "prompts": [], "calls": [], "outside": []}

    def add(table: str, row: dict[str, Any]) -> None:
        tables[table].append(row)
        print(json.dumps(row), flush=True)

    for name, compiler, implementation in itertools.product(
        options.presets, compilers, options.implementations
    ):
        config = st.ModelConfig.preset(name)
        which = {"preset": name, "gpu": compiler.gpu, "implementation": implementation}
        which |= {"products": compiler.products}
        if compiler.weights != "bfloat16":
            which |= {"weights": compiler.weights}

        kinds = (
            ("nodes", options.nodes, step_of, "steps"),
            ("positions", options.prompts, prefill_of, "prompts"),
        )
        for unit, sizes, program, table in kinds:
            for size in sizes:
                build = functools.partial(program, compiler, implementation, size)
                row, programs = by_layer(config, build)
                row["shared_memory_bytes"] = max(each.shared_memory for each in programs)
                row["spills"] = any(each.spills for each in programs)
                if options.whole:
                    row["whole"] = build(config).as_row()
                add(table, which | {unit: size} | row)
        short = shortened(config)
        if options.draft:
            build = functools.partial(call_of, compiler, implementation, short)
            row, programs = by_layer(st.ModelConfig.preset(options.draft), build)
            row["spills"] = any(program.spills for program in programs)
            add("calls", which | {"draft": options.draft} | row)
        for nodes, sampled in itertools.product(options.loop_nodes, (False, True)):
            build = functools.partial(loop_of, compiler, implementation, nodes, sampled=sampled)
            kernels, programs = outside_of_layers(short, build)
            row = {
                "loop_nodes": nodes,
                "sampled": sampled,
                "launches_a_step": sum(kernels.values()),
                "kernels": kernels,
                "bodies": sum((each.bodies for each in programs), Counter()),
                "spills": any(each.spills for each in programs),
            }
            add("outside", which | row)
    *of_models, outside = tables.values()
    passes = list(itertools.chain(*of_models))
    path = report.write(__doc__.splitlines()[0], SETTINGS, tables, options.output / "static.json")
    programs = (*passes, *outside, *(row["whole"] for row in passes if "whole" in row))
    spilled = sum(program["spills"] for program in programs)
    launches = gates.most_launches([*passes, *outside])
    growth = gates.growth_of_memory(passes)
    common.conclude(
        "static",
        programs=len(passes),
        with_spills=spilled,
        most_launches=launches,
        growth_of_memory_percent=growth,
        results=str(path),
    )
    limits = [*options.most_launches, *options.most_outside]
    failures = gates.failures(launches, limits, growth, options.most_growth, spilled)
    failures += gates.not_one_graph(outside) if options.one_graph else []
    gates.conclude(failures)


if __name__ == "__main__":
    main()
