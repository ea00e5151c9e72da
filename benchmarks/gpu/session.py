"""Everything that needs a GPU, in one run under 10 minutes.

bandwidth     of the device's memory, by copying: gives the memory roofline (the floor).
correctness   every kernel and its XLA implementation against the float64 reference, on shapes of
              real models.
lossless      greedy tokens of trees against autoregressive decoding in float32, for a small model
              of every family, with and without the kernels.
kernels       time of a call, XLA and Pallas interleaved, and the floor: operands read once, results
              written once. One sequence (warm L2 cache, launches) and many (memory).
mamba2 steps  time of a verify step of mamba2-2.7b against the number of nodes, XLA and Pallas
              interleaved, and the floor: weights read once, state read once and written once.
hybrid steps  the same for MambaInLlama-8B.
packed        generation with beam trees, packed against unrolled (STree, table 1).
transformers  time of a token of transformers, with the shape of mamba2-2.7b.
end to end    with `--train MINUTES`, which first trains a byte-level pair of 50 million parameters:
              tokens per second, tau and speed-up of chain and tree, and table 1 with that pair.

    python -m benchmarks.gpu_session [--train 3] [--sections kernels ...] [--bandwidth 4.3e12]

Each section gets a share of the remaining time; time that it does not use goes to the later ones.
What did not fit is listed as left out. Results and a plot go to `<device>.json` and
`.png` (in `benchmarks/results` with `--commit`) after every section. Without a GPU nothing is
measured; `--smoke` runs everything with tiny sizes on any device. Exit code 1 if anything is wrong
or fails.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import stree_jax as st
from benchmarks.common import (
    conclude,
    device_name,
    machine,
    plotted,
    print_table,
    read_options,
    write_json,
)
from benchmarks.gpu import byte_pair, kernels, models
from benchmarks.gpu.scale import FULL, SMOKE, Scale
from benchmarks.gpu.sections import Clock, Section, run_sections
from benchmarks.models import on_gpu, random_pair
from pallas_kernels import dispatch

MINUTES = 9.0  # of 10: what has begun is not interrupted
NAMES = (
    *("bandwidth", "correctness", "lossless", "kernels", "mamba2 steps", "hybrid steps"),
    *("packed", "transformers", "end to end", "packed, trained"),
)


def sections_of(
    scale: Scale,
    results: dict[str, Any],
    trained: byte_pair.Trained | None = None,
    known_bandwidth: float | None = None,
) -> list[Section]:
    """All sections; those that need the bandwidth read it from the results of the first."""

    def bandwidth() -> float:
        return results["bandwidth"]

    def measured(_: Clock) -> float:
        return known_bandwidth or kernels.copy_bandwidth(scale.copied, scale.count, scale.rounds)

    def steps(config: st.ModelConfig, clock: Clock) -> dict[str, Any]:
        return models.measure_steps(scale, config, bandwidth(), clock)

    def random(clock: Clock) -> dict[str, Any]:
        pair = random_pair(*scale.pair, scale.dtype, 1, "random pair")
        return models.measure_packed(scale, pair, clock)

    sections = [
        Section("bandwidth", 0.2, measured),
        Section("correctness", 3, functools.partial(kernels.check_kernels, scale)),
        Section("lossless", 3, functools.partial(models.check_lossless, scale)),
        Section("kernels", 2, lambda clock: kernels.time_kernels(scale, bandwidth(), clock)),
        Section("mamba2 steps", 3, functools.partial(steps, scale.mamba2)),
        Section("hybrid steps", 3, functools.partial(steps, scale.hybrid)),
        Section("packed", 2, random),
        Section("transformers", 1, functools.partial(models.measure_transformers, scale)),
    ]
    if trained is not None:
        packed = functools.partial(models.measure_packed, scale, trained.pair)
        sections += [
            Section("end to end", 3, functools.partial(models.end_to_end, scale, trained)),
            Section("packed, trained", 2, packed),
        ]
    return sections


def versions() -> dict[str, str]:
    """Versions of installed packages that the results depend on."""
    found = {}
    for package in (
        *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy"),
        *("torch", "transformers", "mamba-ssm", "causal-conv1d"),
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def aims(results: Mapping[str, Any]) -> dict[str, dict[str, float | bool]]:
    """The aims for an H200, and whether the measurements meet them."""
    steps = results.get("mamba2 steps", {})
    tables = (results.get("packed") or {}).get("rows", [])
    largest = max(tables, key=lambda row: row["nodes"], default={})
    measured = {
        "one node of mamba2-2.7b over the floor": (steps.get("one_node_over_floor"), 1.5),
        "63 nodes of mamba2-2.7b over one": (steps.get("63_nodes_over_one"), 1.3),
        "unrolled over packed": (largest.get("packed_is_faster_by"), 2.0),
    }
    return {
        name: {
            "measured": value,
            "aim": aim,
            "met": value >= aim if "packed" in name else value <= aim,
        }
        for name, (value, aim) in measured.items()
        if value is not None
    }


def report(results: Mapping[str, Any]) -> None:
    """Prints tables of what was measured, and lists what was not."""
    device = results["machine"]["device"]
    for name in ("mamba2 steps", "hybrid steps"):
        if steps := results.get(name, {}).get("steps"):
            kinds = list(steps[0]["milliseconds"])
            print_table(
                f"{name}, {device}, ms; floor {results[name]['floor_milliseconds']:.3g}",
                ("nodes", *kinds),
                [
                    (row["nodes"], *(row["milliseconds"][kind]["median"] for kind in kinds))
                    for row in steps
                ],
            )
    if rows := results.get("kernels"):
        print_table(
            f"a call of each kernel, {device}, microseconds",
            ("kernel", "shape", "nodes", "batch", *rows[0]["microseconds"], "floor"),
            [
                (
                    *(row[key] for key in ("kernel", "shape", "nodes", "batch")),
                    *(value["median"] for value in row["microseconds"].values()),
                    row["floor_microseconds"],
                )
                for row in rows
            ],
        )
    print_table(
        "sections",
        ("section", "allowed, s", "took, s", "left out", "failed"),
        [
            (
                name,
                note["allowed_seconds"],
                note.get("seconds", 0.0),
                f"- {len(note['left_out'])}" if note["left_out"] else "",
                note.get("failed", "")[:60],
            )
            for name, note in results["sections"].items()
        ],
    )
    for name, note in results["sections"].items():
        if note["left_out"]:
            print(f"{name} left out: {'; '.join(note['left_out'])}")


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Time of a step by nodes and its floor, for each model; time of kernels over their floors."""
    with plotted(path, 3, 15, 4.5) as axes:
        for ax, name in zip(axes, ("mamba2 steps", "hybrid steps"), strict=False):
            ax.set(title=name, xlabel="nodes", ylabel="ms a step")
            if steps := results.get(name, {}).get("steps"):
                for kind in steps[0]["milliseconds"]:
                    times = [row["milliseconds"][kind]["median"] for row in steps]
                    ax.plot([row["nodes"] for row in steps], times, marker="o", label=kind)
                floor = results[name]["floor_milliseconds"]
                ax.axhline(floor, color="black", linewidth=0.8, label="floor")
                ax.set_ylim(bottom=0)
                ax.legend()
        if rows := results.get("kernels"):
            many = max(row["batch"] for row in rows)
            rows = [row for row in rows if row["batch"] == many]
            names = [f"{row['kernel']}, {row['nodes']}, {row['shape']}" for row in rows]
            axes[2].barh(names, [row["kernel_over_floor"] for row in rows])
            axes[2].axvline(1, color="black", linewidth=0.8)
            axes[2].invert_yaxis()
            axes[2].tick_params(axis="y", labelsize=6)
            axes[2].set(title=f"kernels, batch of {many}", xlabel="time over the floor")


def is_right(results: Mapping[str, Any]) -> bool:
    """Whether nothing failed and all checks passed."""
    return (
        not any("failed" in note for note in results["sections"].values())
        and results.get("correctness", {}).get("right", True)
        and results.get("lossless", {}).get("identical", True)
        and results.get("end to end", {}).get("same_tokens_in_float32", True)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sections and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything")
    parser.add_argument("--train", type=float, metavar="MINUTES", help="of them, for training")
    parser.add_argument("--sections", nargs="+", choices=NAMES, help="only these")
    parser.add_argument("--bandwidth", type=float, help="of the memory, bytes a second")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    options = read_options(parser, arguments)
    # JAX would take three quarters of the memory, and leave too little for torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.smoke:  # which mostly compiles
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if not options.smoke and not on_gpu():
        print(
            f"no GPU here: the default backend is {jax.default_backend()!r}; nothing was measured"
        )
        return
    if options.train is not None and not 0 < options.train < options.minutes:
        parser.error(f"--train {options.train:g} is not within --minutes {options.minutes:g}")
    if options.smoke and options.commit:
        parser.error("times of tiny sizes are not results: --smoke goes without --commit")
    scale = SMOKE if options.smoke else FULL
    end = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "kernels_chosen": dispatch.explain(),
        "smoke": options.smoke,
    }
    name = device_name(results["machine"])
    trained = None
    if options.train is not None:
        byte_pair.text_directory()  # fails early if there are no texts
        print(f"training: {options.train:g} minutes", flush=True)
        target, draft, training = scale.training
        trained = byte_pair.train(60 * options.train, target=target, draft=draft, training=training)
        results["training"] = trained.report
    sections = sections_of(scale, results, trained, options.bandwidth)
    if options.sections is not None:
        sections = [s for s in sections if s.name in ("bandwidth", *options.sections)]

    def save() -> Path:
        return write_json(name, results, options.output)

    run_sections(sections, end - time.monotonic(), results, save)
    if not options.smoke:
        results["aims"] = aims(results)
    path = save()
    report(results)
    try:
        plot(results, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")
    right = is_right(results)
    conclude(
        "gpu_session",
        passed=right,
        right=right,
        left_out=sum(len(note["left_out"]) for note in results["sections"].values()),
        aims=results.get("aims"),
        results=str(path),
    )
