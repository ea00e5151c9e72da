"""Is it faster on this device to multiply by one expert's matrices at a time?

A layer of experts with random float32 weights: products with all matrices at once (gathered for
few tokens, `ragged_dot` for many), a loop over the experts, and `expert_mlps`, which takes the loop
on a CPU, products or the kernel elsewhere.

    python -m benchmarks.experts [--shape Granite-4-H-Tiny] [--tokens 1 4 16 64 512] [--rounds 7]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.cases import CASES
from benchmarks.cases.base import Problem, relative_error
from benchmarks.cases.moe import expert_options
from benchmarks.common import (
    conclude,
    interleaved,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.shapes import EXPERTS, ExpertShape
from pallas_kernels.moe import xla


def measure(shape: ExpertShape, tokens: int, rounds: int, progress: Any) -> dict[str, Any]:
    """Milliseconds of a layer by method, and the relative difference to the products."""
    case = CASES["expert_mlps"]
    operands = case.operands(Problem(shape, tokens, "float32"))
    options = expert_options(operands)

    def through(method: Any) -> Any:
        def run(x: Any, weights: Any, chosen: Any, *experts: Any) -> jax.Array:
            return xla.weighted_sum(method(x, chosen, *experts, **options), weights)

        return run

    functions = {
        "products": jax.jit(through(xla.products)),
        "loops": jax.jit(through(xla.loops)),
        "expert_mlps": jax.jit(case.function),
    }
    outputs = {name: jax.block_until_ready(run(*operands)) for name, run in functions.items()}
    calls = {
        name: lambda run=run: jax.block_until_ready(run(*operands))
        for name, run in functions.items()
    }
    seconds = interleaved(calls, rounds, progress)
    milliseconds = {
        name: summary([1e3 * value for value in values]) for name, values in seconds.items()
    }
    return {
        "tokens": tokens,
        "milliseconds": milliseconds,
        "products_over_loops": milliseconds["products"]["median"] / milliseconds["loops"]["median"],
        "relative_difference": {
            name: relative_error(value, outputs["products"]) for name, value in outputs.items()
        },
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time by tokens."""
    with plotted(path, 1, 6, 4) as axes:
        for name in rows[0]["milliseconds"]:
            medians = [row["milliseconds"][name]["median"] for row in rows]
            axes.loglog([row["tokens"] for row in rows], medians, marker="o", label=name)
        axes.set(xlabel="tokens", ylabel="milliseconds of a layer of experts")
        axes.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes `experts-<device>.json` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Granite-4-H-Tiny", choices=EXPERTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=7)
    options = read_options(parser, arguments, plots=True)
    shape = EXPERTS[options.shape]
    with progress_bar() as progress:
        task = progress.add_task("layers", total=3 * options.rounds * len(options.tokens))
        rows = [
            measure(shape, tokens, options.rounds, lambda: progress.advance(task))
            for tokens in options.tokens
        ]
    print_table(
        f"A layer of experts of {options.shape}, float32, milliseconds",
        ("tokens", *rows[0]["milliseconds"], "products / loops"),
        [
            (
                row["tokens"],
                *(f"{value['median']:.1f}" for value in row["milliseconds"].values()),
                f"{row['products_over_loops']:.1f}",
            )
            for row in rows
        ],
    )
    path = save("experts", __doc__, {"shape": options.shape, "rows": rows}, options.output)
    plot(rows, path.with_suffix(".png"))
    conclude("experts", shape=options.shape, results=str(path))


if __name__ == "__main__":
    main()
