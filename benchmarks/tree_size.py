"""How does the time of a target call grow with the tree, and what does packing the tree save?

Full binary trees of 4, 5 and 6 levels (STree, figure 3): packed into one sequence, and unrolled,
each root-to-leaf path a row of a batch. Then the time t(N) of packed trees with a linear and a
quadratic fit, and how much longer the paths accepted from N nodes must be than those from a chain
of 5 nodes for the same speed (figure 2, equations 7 and 8). A call does what a decode step does:
replay, forward, best tokens. Weights are random.

    python -m benchmarks.tree_size [--preset mamba2-2.7b] [--layers 8] [--dtype bfloat16]
"""

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.common import Found, Memory, Panel, Table, num_bytes, summary, timed
from benchmarks.models import RANDOM_NOTE, default_dtype, on_gpu, random_model, shape
from benchmarks.steps import binary_tree, run_steps
from benchmarks.unrolled import UnrolledLM

SIZES = (1, 2, 5, 8, 15, 24, 31, 48, 63)
VANILLA = 5  # nodes of the chain that the paper compares with
KINDS = {"packed": None, "unrolled": UnrolledLM}


def tree_of(nodes: int) -> st.TreeTopology:
    """The first nodes of a full binary tree, level by level; a chain up to `VANILLA`."""
    return st.TreeTopology.chain(nodes - 1) if nodes <= VANILLA else binary_tree(nodes)


def measure(
    config: st.ModelConfig,
    *,
    dtype: str,
    levels: Sequence[int],
    sizes: Sequence[int],
    count: int,
    rounds: int,
) -> dict[str, Any]:
    """Times all methods and sizes, interleaved.

    Args:
        config: shape of the target.
        dtype: weights' dtype.
        levels: heights of full binary trees, for all methods.
        sizes: numbers of nodes of packed trees.
        count: number of steps in a timed call.
        rounds: number of timed calls.
    """
    model = random_model(config, dtype)
    runs = {("packed", nodes): (model, tree_of(nodes)) for nodes in sizes}
    for height, (name, kind) in itertools.product(levels, KINDS.items()):
        target = model if kind is None else kind.like(model, 2 ** (height - 1), height)
        runs[name, 2**height - 1] = target, st.TreeTopology.complete(2, height - 1)
    programs = {key: run_steps.lower(*pair, count).compile() for key, pair in runs.items()}

    def call(key: tuple[str, int], _: None) -> np.ndarray:
        return np.asarray(programs[key](runs[key][0]))

    ways = {key: functools.partial(call, key) for key in runs}
    tokens, seconds = timed("target calls", ways, [None], rounds)
    found = {
        key: {
            "milliseconds": summary(1e3 * seconds[key][:, 0] / count),
            "temporary_bytes": Memory.of(programs[key]).temporary,
        }
        for key in runs
    }
    trees = []
    for height, (name, kind) in itertools.product(levels, KINDS.items()):
        nodes, leaves = 2**height - 1, 2 ** (height - 1)
        mine, packed = found[name, nodes], found["packed", nodes]
        tree = {
            "levels": height,
            "method": name,
            "states": leaves if kind else 1,
            "tokens_computed": leaves * height if kind else nodes,
            "times_packed": mine["milliseconds"]["median"] / packed["milliseconds"]["median"],
            "same_tokens": np.array_equal(tokens[name, nodes][0], tokens["packed", nodes][0]),
        }
        trees.append(tree | mine)
    return {
        "dtype": dtype,
        "d_model": config.d_model,
        "layers": len(config.layers),
        "weight_bytes": num_bytes(nnx.state(model)),
        "trees": trees,
        "sizes": [
            {"nodes": nodes} | found[name, nodes]
            for name, nodes in sorted(found)
            if name == "packed"
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


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Full binary trees packed and unrolled; t(N) of packed trees with its fits."""
    config, dtype = shape(options.preset, options.layers), options.dtype or default_dtype()
    count = options.count or (20 if on_gpu() else 4)
    rounds = options.rounds or (10 if on_gpu() else 7)
    size = {"levels": options.levels, "count": count, "rounds": rounds}
    results = measure(config, dtype=dtype, sizes=SIZES, **size)
    checked = results["trees"]
    if dtype != "float32":  # its rounding depends on the number of rows
        size |= {"count": 3, "rounds": 1}
        small = shape(options.preset, 2)
        checked = measure(small, dtype="float32", sizes=(1,), **size)["trees"]
    wrong = [row["method"] for row in checked if not row["same_tokens"]]
    fit = fits(results["sizes"])
    needed = [
        size
        | {"measured": fit["measured_tau_ratio_needed"][i]}
        | {name: fit[name]["tau_ratio_needed"][i] for name in ("linear", "quadratic")}
        for i, size in enumerate(results["sizes"])
    ]
    ms, names = "{milliseconds[median]}", ("measured", "linear", "quadratic")
    ratio = f"tau needed, chain of {VANILLA} nodes = 1"
    yield Found(
        results
        | {"preset": options.preset, "note": RANDOM_NOTE}
        | {"same_tokens_in_float32": not wrong, "fits": fit},
        [
            Table(
                f"A call, {len(config.layers)} layers of {config.d_model}, {dtype}",
                results["trees"],
                {"levels": "{levels}", "method": "{method}", "states": "{states}"}
                | {"tokens": "{tokens_computed}", "ms": "{milliseconds[median]:.3g}"}
                | {"times packed": "{times_packed:.2f}", "bytes": "{temporary_bytes:,}"},
            ),
            Table(
                f"t(N) of packed trees, and tau needed relative to a chain of {VANILLA} nodes",
                needed,
                {"nodes": "{nodes}", "ms": "{milliseconds[median]:.3g}"}
                | {name: f"{{{name}:.3g}}" for name in names},
            ),
        ],
        [
            Panel("levels", "ms a call", results["trees"], "{levels}", {"{method}": ms}),
            Panel("nodes", "ms a call", needed, "{nodes}", {"measured": ms}),
            Panel("nodes", ratio, needed, "{nodes}", {name: f"{{{name}}}" for name in names}),
        ],
        wrong=wrong,
        line={"unrolled_over_packed": results["trees"][-1]["times_packed"]},
    )


if __name__ == "__main__":
    from benchmarks.experiments import main

    main("tree_size", __doc__)
