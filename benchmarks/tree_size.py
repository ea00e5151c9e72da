"""How does the time of a target call grow with the tree?

The time t(N) of a call on N nodes with a linear and a quadratic fit, and how much longer the paths
accepted from N nodes must be than those from a chain of 5 nodes for the same speed (STree, figure
2, equations 7 and 8). A call does what a decode step does: replay, forward, best tokens. Weights
are random; the default shape is as wide as mamba2-130m, with fewer layers and a smaller vocabulary:
minutes on two CPU cores.

    python -m benchmarks.tree_size [--preset mamba2-2.7b] [--layers 8] [--dtype bfloat16]
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.models import RANDOM_NOTE, default_dtype, on_gpu, random_model
from benchmarks.steps import binary_tree, time_of_calls
from stree_jax.measuring.report import Table

OPTIONS = {"--preset": None, "--layers": {"type": int}, "--rounds": 7}
OPTIONS |= {"--dtype": {"choices": ("float32", "bfloat16")}}

DEFAULT = st.ModelConfig.mamba2_lm(4096, 768, 8)
SIZES = (1, 2, 5, 8, 15, 24, 31, 48, 63)
VANILLA = 5  # nodes of the chain that the paper compares with


def tree_of(nodes: int) -> st.TreeTopology:
    """The first nodes of a full binary tree, level by level; a chain up to `VANILLA`."""
    return st.TreeTopology.chain(nodes - 1) if nodes <= VANILLA else binary_tree(nodes)


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
    result["measured_tau_ratio_needed"] = (times / times[nodes == VANILLA][0]).tolist()
    return result


def run(options: argparse.Namespace) -> Iterator[Found]:
    """t(N) with its fits."""
    config = st.ModelConfig.preset(options.preset) if options.preset else DEFAULT
    config = dataclasses.replace(config, layers=config.layers[: options.layers])
    dtype = options.dtype or default_dtype()
    count = 20 if on_gpu() else 4  # calls in a timed run
    model, trees = random_model(config, dtype), {nodes: tree_of(nodes) for nodes in SIZES}
    calls = time_of_calls(options.preset or "default shape", model, count, options.rounds, trees)
    times = calls["milliseconds_by_nodes"]
    sizes = [{"nodes": nodes, "milliseconds": time} for nodes, time in times.items()]
    fit = fits(sizes)
    ratios = {"measured": fit["measured_tau_ratio_needed"]}
    ratios |= {name: fit[name]["tau_ratio_needed"] for name in ("linear", "quadratic")}
    needed = [s | {name: each[i] for name, each in ratios.items()} for i, s in enumerate(sizes)]
    what = f"{len(config.layers)} layers of {config.d_model}, {dtype}"
    yield Found(
        {"preset": options.preset, "note": RANDOM_NOTE, "dtype": dtype, "sizes": sizes}
        | {"d_model": config.d_model, "layers": len(config.layers), "fits": fit},
        [
            Table(
                f"t(N), {what}; tau needed relative to a chain of {VANILLA} nodes",
                needed,
                {"nodes": "{nodes}", "ms": "{milliseconds[median]:.3g}"}
                | {name: f"{{{name}:.3g}}" for name in ratios},
            )
        ],
        line={"quadratic": fit["quadratic"]["coefficients"]},
    )


if __name__ == "__main__":
    main(run, OPTIONS)
