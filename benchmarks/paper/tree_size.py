"""How does the time of a target call grow with the tree, and what does packing the tree save?

Full binary trees of 4, 5 and 6 levels (STree, figure 3): packed into one sequence; unrolled, each
root-to-leaf path a row of a batch; and the same rows one token at a time, by the recurrent step.
Then the time t(N) of packed trees with a linear and a quadratic fit, and how much longer the paths
accepted from N nodes must be than those from a chain of 5 nodes for the same speed (figure 2,
equations 7 and 8). A call does what a decode step does: replay, forward, best tokens. Weights are
random.

    python -m benchmarks.tree_size [--preset mamba2-2.7b] [--layers 8] [--dtype bfloat16]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

import stree_jax as st
from benchmarks.common import (
    Memory,
    conclude,
    interleaved,
    machine,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.models import RANDOM_NOTE, default_dtype, num_bytes, on_gpu, random_model, shape
from benchmarks.paper.unrolled import SequentialLM, UnrolledLM
from benchmarks.steps import run_steps

LEVELS = (4, 5, 6)
SIZES = (1, 2, 5, 8, 15, 24, 31, 48, 63)
VANILLA = 5  # nodes of the chain that the paper compares with


def tree_of(nodes: int) -> st.TreeTopology:
    """The first nodes of a full binary tree, level by level; a chain up to `VANILLA`."""
    if nodes <= VANILLA:
        return st.TreeTopology.chain(nodes - 1)
    return st.TreeTopology((-1, *((node - 1) // 2 for node in range(1, nodes))))


def measure(
    config: st.ModelConfig,
    *,
    dtype: str,
    levels: tuple[int, ...],
    sizes: tuple[int, ...],
    count: int,
    rounds: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Times all methods and sizes, interleaved.

    Args:
        config: of the target.
        dtype: of the weights.
        levels: of full binary trees, for all methods.
        sizes: nodes of packed trees.
        count: steps in one timed call.
        rounds: timed calls.
        progress: a bar for it.
    """
    progress = progress or Progress(disable=True)
    model = random_model(config, dtype)
    runs: dict[tuple[str, int], tuple[st.HybridLM, st.TreeTopology]] = {
        ("packed", nodes): (model, tree_of(nodes)) for nodes in sizes
    }
    for num_levels in levels:
        tree = st.TreeTopology.complete(2, num_levels - 1)
        runs["packed", tree.num_nodes] = model, tree
        leaves = 2 ** (num_levels - 1)
        for name, kind in (("unrolled", UnrolledLM), ("token by token", SequentialLM)):
            runs[name, tree.num_nodes] = kind.like(model, leaves, num_levels), tree

    task = progress.add_task("compiling", total=len(runs) * (2 + rounds))
    programs, tokens = {}, {}
    for key, (target, tree) in runs.items():
        programs[key] = run_steps.lower(target, tree, count).compile()
        progress.advance(task)
    for key, program in programs.items():
        tokens[key] = np.asarray(program(runs[key][0]))
        progress.advance(task)

    def call(key: tuple[str, int]) -> Any:
        return lambda: programs[key](runs[key][0]).block_until_ready()

    names = {json.dumps(key): key for key in runs}
    progress.update(task, description="timing")
    seconds = interleaved(
        {name: call(key) for name, key in names.items()}, rounds, lambda: progress.advance(task)
    )
    milliseconds = {
        key: summary([1e3 * value / count for value in seconds[name]])
        for name, key in names.items()
    }
    trees = []
    for num_levels in levels:
        nodes, leaves = 2**num_levels - 1, 2 ** (num_levels - 1)
        for name in ("packed", "unrolled", "token by token"):
            key = name, nodes
            trees.append(
                {
                    "levels": num_levels,
                    "method": name,
                    "states": 1 if name == "packed" else leaves,
                    "tokens_computed": nodes if name == "packed" else leaves * num_levels,
                    "milliseconds": milliseconds[key],
                    "times_packed": milliseconds[key]["median"]
                    / milliseconds["packed", nodes]["median"],
                    "temporary_bytes": Memory.of(programs[key]).temporary,
                    "same_tokens": bool(np.array_equal(tokens[key], tokens["packed", nodes])),
                }
            )
    packed = sorted(nodes for name, nodes in runs if name == "packed")
    return {
        "dtype": dtype,
        "d_model": config.d_model,
        "layers": len(config.layers),
        "weight_bytes": num_bytes(model),
        "trees": trees,
        "sizes": [
            {
                "nodes": nodes,
                "milliseconds": milliseconds["packed", nodes],
                "temporary_bytes": Memory.of(programs["packed", nodes]).temporary,
            }
            for nodes in packed
        ],
    }


def fits(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """`t = k N + C` and `t = a N^2 + b N + c`, and the ratios of acceptance lengths they require.

    A tree of N nodes is as fast as the chain of `VANILLA` nodes if its acceptance length is at
    least t(N) / t(VANILLA) times the chain's (equation 7; 8 with the quadratic).
    """
    nodes = np.array([size["nodes"] for size in sizes], float)
    times = np.array([size["milliseconds"]["median"] for size in sizes])
    result: dict[str, Any] = {"nodes": nodes.tolist(), "vanilla": VANILLA}
    for name, degree in (("linear", 1), ("quadratic", 2)):
        polynomial = np.polyfit(nodes, times, degree)
        fitted = np.polyval(polynomial, nodes)
        result[name] = {
            "coefficients": polynomial.tolist(),
            "largest_relative_error": float(np.max(np.abs(fitted / times - 1))),
            "tau_ratio_needed": (fitted / np.polyval(polynomial, VANILLA)).tolist(),
        }
    if VANILLA in nodes:
        result["measured_tau_ratio_needed"] = (times / times[nodes == VANILLA][0]).tolist()
    return result


def plot(results: dict[str, Any], path: Path) -> None:
    """Methods by levels, t(N) with its fits, and the ratio of acceptance lengths needed."""
    with plotted(path, 3, 14, 4) as panels:
        left, middle, right = panels
        for name in ("packed", "unrolled", "token by token"):
            rows = [row for row in results["trees"] if row["method"] == name]
            times = [row["milliseconds"]["median"] for row in rows]
            left.plot([row["levels"] for row in rows], times, marker="o", label=name)
        left.set(xlabel="levels of a full binary tree", ylabel="ms a call", ylim=0)
        left.set_xticks(sorted({row["levels"] for row in results["trees"]}))
        fit = results["fits"]
        nodes = np.array(fit["nodes"])
        times = [size["milliseconds"]["median"] for size in results["sizes"]]
        middle.plot(nodes, times, "o", label="measured")
        right.plot(nodes, fit["measured_tau_ratio_needed"], "o", label="measured")
        dense = np.linspace(1, nodes.max(), 100)
        for name in ("linear", "quadratic"):
            curve = np.polyval(fit[name]["coefficients"], dense)
            middle.plot(dense, curve, label=name)
            right.plot(dense, curve / np.polyval(fit[name]["coefficients"], VANILLA), label=name)
        middle.set(xlabel="nodes of a packed tree", ylabel="ms a call", ylim=0)
        right.set(xlabel="nodes", ylabel=f"tau needed, chain of {VANILLA} nodes = 1", ylim=0)
        for axes in panels:
            axes.legend()


def main() -> None:
    """Measures, prints the tables, and writes JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", help="a shape; default: mamba2-2.7b on a GPU, small on a CPU")
    parser.add_argument("--layers", type=int, help="only the first layers")
    parser.add_argument("--dtype", default=default_dtype(), choices=("float32", "bfloat16"))
    parser.add_argument("--count", type=int, default=20 if on_gpu() else 4)
    parser.add_argument("--rounds", type=int, default=10 if on_gpu() else 7)
    options = read_options(parser, plots=True)
    config = shape(options.preset, options.layers)
    with progress_bar() as progress:
        results = measure(
            config,
            dtype=options.dtype,
            levels=LEVELS,
            sizes=SIZES,
            count=options.count,
            rounds=options.rounds,
            progress=progress,
        )
        checked = results["trees"]
        if options.dtype != "float32":  # its rounding depends on the number of rows
            checked = measure(
                shape(options.preset, 2),
                dtype="float32",
                levels=LEVELS,
                sizes=(1,),
                count=3,
                rounds=1,
                progress=progress,
            )["trees"]
    same = all(row["same_tokens"] for row in checked)
    results |= {
        "machine": machine(),
        "preset": options.preset,
        "note": RANDOM_NOTE,
        "same_tokens_in_float32": same,
        "fits": fits(results["sizes"]),
    }
    device = results["machine"]["device"]
    print_table(
        f"A call on a full binary tree, {device}, {len(config.layers)} layers of {config.d_model},"
        f" {options.dtype}",
        ("levels", "method", "states", "tokens", "ms", "times packed", "temporary MiB"),
        [
            (
                row["levels"],
                row["method"],
                row["states"],
                row["tokens_computed"],
                row["milliseconds"]["median"],
                row["times_packed"],
                row["temporary_bytes"] / 2**20,
            )
            for row in results["trees"]
        ],
    )
    fit = results["fits"]
    print_table(
        f"t(N) of packed trees, and tau needed relative to a chain of {VANILLA} nodes",
        ("nodes", "ms", "measured", "linear (7)", "quadratic (8)"),
        [
            (
                size["nodes"],
                size["milliseconds"]["median"],
                fit["measured_tau_ratio_needed"][i],
                fit["linear"]["tau_ratio_needed"][i],
                fit["quadratic"]["tau_ratio_needed"][i],
            )
            for i, size in enumerate(results["sizes"])
        ],
    )
    path = save("tree-size", __doc__, results, options.output)
    plot(results, path.with_suffix(".png"))
    largest = {row["method"]: row for row in results["trees"] if row["levels"] == max(LEVELS)}
    conclude(
        "tree_size",
        passed=same,
        unrolled_over_packed=round(largest["unrolled"]["times_packed"], 3),
        same_tokens=same,
        results=str(path),
    )
