"""Does it pay on this device to take one expert's matrices at a time?

One layer of experts with random float32 weights: products of many matrices at once (gathered ones
for few tokens, `ragged_dot` for many), loops over the experts, and what `expert_mlps` does here.
The op takes loops on a CPU, products or the kernel elsewhere.

    python -m benchmarks.experts [--shape Granite-4-H-Tiny] [--tokens 1 4 16 64 512] [--rounds 7]
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
from rich.progress import Progress

from benchmarks.common import device_name, interleaved, machine, print_table, summary, write_json
from benchmarks.kernels import KERNELS, Problem, expert_options, relative_error
from benchmarks.shapes import EXPERTS, ExpertShape
from pallas_kernels.expert_mlps import xla


def measure(shape: ExpertShape, tokens: int, rounds: int, progress: Any) -> dict[str, Any]:
    """Milliseconds of a layer by method, and how far the others are from the products."""
    kernel = KERNELS["expert_mlps"]
    operands = kernel.operands(Problem(shape, tokens, "float32"))
    options = expert_options(operands)

    def through(method: Any) -> Any:
        def run(x: Any, weights: Any, chosen: Any, *experts: Any) -> jax.Array:
            return xla.weighted_sum(method(x, chosen, *experts, **options), weights)

        return run

    functions = {
        "products": jax.jit(through(xla.products)),
        "loops": jax.jit(through(xla.loops)),
        "expert_mlps": jax.jit(kernel.function),
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


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Time by tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name in rows[0]["milliseconds"]:
        medians = [row["milliseconds"][name]["median"] for row in rows]
        axes.loglog([row["tokens"] for row in rows], medians, marker="o", label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds of a layer of experts")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes `results/experts-<device>.json` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Granite-4-H-Tiny", choices=EXPERTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    shape = EXPERTS[options.shape]
    with Progress(transient=True) as progress:
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
    where = machine()
    results = {"question": __doc__.splitlines()[0], "machine": where, "shape": options.shape}
    path = write_json(f"experts-{device_name(where)}", results | {"rows": rows})
    plot(rows, str(path.with_suffix(".png")))
    print(json.dumps({"experts": {"shape": options.shape, "results": str(path)}}))


if __name__ == "__main__":
    main()
