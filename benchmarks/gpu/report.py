"""What the rows of a GPU session say together: floors, wrong kernels, aims, tables, a plot."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import plotted, print_table
from benchmarks.gpu.tasks import Row
from benchmarks.paper.tree_size import VANILLA, fits

STEPS = ("steps", "hybrid", "batch")
CHECKS = ("gate", "correctness")


def rows_of(results: Mapping[str, Any], name: str) -> list[Row]:
    """The rows of a section that were measured."""
    rows = results["sections"].get(name, {}).get("rows", [])
    return [row for row in rows if "failed" not in row or "microseconds" in row]


def kernels_time(times: Mapping[str, Mapping[str, float]]) -> float | None:
    """The median of the kernels, which have the last name of those of all kinds of rows."""
    found = [times[name]["median"] for name in ("pallas", "pallas_interpret") if name in times]
    return found[0] if found else None


def annotate(results: dict[str, Any]) -> None:
    """Adds to rows what other sections have found: their floor, and whether they are of use.

    A row is `wrong` if a check found the kernel wrong, whatever its shape; steps are if any was.
    """
    speed = max((row["bytes_per_second"] for row in rows_of(results, "bandwidth")), default=None)
    wrong = wrong_kernels(results)
    for name in (*STEPS, "kernels"):
        for row in rows_of(results, name):
            unit, scale = ("microseconds", 1e6) if name == "kernels" else ("milliseconds", 1e3)
            fastest = kernels_time(row[unit])
            if speed:
                row[f"floor_{unit}"] = scale * row["bytes"] / speed
            if fastest and speed:
                row["kernel_over_floor"] = fastest / row[f"floor_{unit}"]
            if fastest and "xla" in row[unit]:
                row["xla_over_kernel"] = row[unit]["xla"]["median"] / fastest
            row["wrong"] = sorted(wrong & {row["kernel"]} if name == "kernels" else wrong)
    for name in ("steps", "hybrid"):
        sizes = [row for row in rows_of(results, name) if kernels_time(row["milliseconds"])]
        if len(sizes) > 3 and VANILLA in {row["nodes"] for row in sizes}:
            sizes.sort(key=lambda row: row["nodes"])
            times = [{"median": kernels_time(row["milliseconds"])} for row in sizes]
            results["sections"][name]["fits"] = fits(
                [
                    {"nodes": row["nodes"], "milliseconds": time}
                    for row, time in zip(sizes, times, strict=True)
                ]
            )


def wrong_kernels(results: Mapping[str, Any]) -> set[str]:
    """The kernels of which a check is not right."""
    return {
        row.get("kernel", row["task"].split(",")[0])
        for name in CHECKS
        for row in results["sections"].get(name, {}).get("rows", [])
        if not row.get("right")
    }


def is_right(results: Mapping[str, Any]) -> bool:
    """Whether nothing failed and all checks passed."""
    sections = results["sections"].values()
    rows = [row for section in sections for row in section["rows"]]
    return not any("failed" in part for part in (*sections, *rows)) and all(
        row["right"] for row in rows if "right" in row
    )


def left_out(results: Mapping[str, Any]) -> int:
    """How many tasks there was no time for."""
    return sum(len(section.get("left_out", [])) for section in results["sections"].values())


def aims(results: Mapping[str, Any]) -> dict[str, dict[str, float | bool]]:
    """The aims for an H200, and whether the measurements meet them."""
    steps = {row["nodes"]: row for row in rows_of(results, "steps")}
    times = {nodes: kernels_time(row["milliseconds"]) for nodes, row in steps.items()}
    tables = rows_of(results, "packed")
    largest: Row = max(tables, key=lambda row: row["nodes"], default={})
    ratios = [row.get("xla_over_kernel") for row in rows_of(results, "batch")]
    measured = {
        "one node of mamba2-2.7b over the floor": (
            steps.get(1, {}).get("kernel_over_floor"),
            1.5,
        ),
        "63 nodes of mamba2-2.7b over one": (
            times[63] / times[1] if times.get(63) and times.get(1) else None,
            1.3,
        ),
        "unrolled over packed": (largest.get("packed_is_faster_by"), 2.0),
        "XLA over our kernels, worst batch": (min(filter(None, ratios), default=None), 1.0),
    }
    return {
        name: {
            "measured": value,
            "aim": aim,
            "met": value <= aim if "node" in name else value >= aim,
        }
        for name, (value, aim) in measured.items()
        if value is not None
    }


def report(results: Mapping[str, Any]) -> None:
    """Prints tables of what was measured, and lists what was not."""
    device = (results["machine"] or {}).get("device", "no device")
    for name in STEPS:
        if rows := rows_of(results, name):
            kinds = list(rows[0]["milliseconds"])
            print_table(
                f"{name}, {device}, ms",
                ("nodes", "batch", *kinds, "floor", "wrong kernels"),
                [
                    (
                        *(row["nodes"], row["batch"]),
                        *(row["milliseconds"][kind]["median"] for kind in kinds),
                        row.get("floor_milliseconds", "-"),
                        ", ".join(row["wrong"]),
                    )
                    for row in sorted(rows, key=lambda row: (row["nodes"], row["batch"]))
                ],
            )
    if rows := rows_of(results, "kernels"):
        kinds = list(dict.fromkeys(kind for row in rows for kind in row["microseconds"]))
        print_table(
            f"a call of each kernel, {device}, microseconds",
            ("kernel", "shape", "nodes", "batch", *kinds, "floor", ""),
            [
                (
                    *(row[key] for key in ("kernel", "shape", "nodes", "batch")),
                    *(row["microseconds"].get(kind, {}).get("median", "-") for kind in kinds),
                    row.get("floor_microseconds", "-"),
                    "WRONG" if row["wrong"] else "",
                )
                for row in rows
            ],
        )
    print_table(
        "sections",
        ("section", "state", "took, s", "rows", "left out", "failed"),
        [
            (
                name,
                note["state"],
                note.get("seconds", 0.0),
                len(note["rows"]),
                len(note.get("left_out", [])),
                sum("failed" in row for row in note["rows"]),
            )
            for name, note in results["sections"].items()
        ],
    )
    for name, note in results["sections"].items():
        if note.get("left_out"):
            print(f"{name} left out: {'; '.join(note['left_out'])}")
        if "failed" in note:
            print(f"{name} failed: {note['failed']}")
        for row in note["rows"]:
            if "failed" in row or row.get("right") is False:
                print(f"{name}, {row['task']}: {row.get('failed', 'wrong')}"[:400])


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Time of a step by nodes and by batch, and of kernels over their floors."""
    with plotted(path, 4, 20, 4.5) as panels:
        for axes, name in zip(panels, STEPS, strict=False):
            by = "batch" if name == "batch" else "nodes"
            axes.set(title=name, xlabel=by, ylabel="ms a step")
            rows = sorted(rows_of(results, name), key=lambda row: row[by])
            most = max((row["nodes"] for row in rows), default=0)
            if name == "batch":
                rows = [row for row in rows if row["nodes"] == most]
            for kind in rows[0]["milliseconds"] if rows else ():
                times = [row["milliseconds"][kind]["median"] for row in rows]
                axes.plot([row[by] for row in rows], times, marker="o", label=kind)
            floors = [row["floor_milliseconds"] for row in rows if "floor_milliseconds" in row]
            if floors:
                axes.axhline(statistics.median(floors), color="black", lw=0.8, label="floor")
                axes.set_ylim(bottom=0)
                axes.legend()
        rows = [row for row in rows_of(results, "kernels") if "kernel_over_floor" in row]
        many = max((row["batch"] for row in rows), default=0)
        rows = [row for row in rows if row["batch"] == many]
        names = [f"{row['kernel']}, {row['nodes']}, {row['shape']}" for row in rows]
        panels[3].barh(names, [row["kernel_over_floor"] for row in rows])
        panels[3].axvline(1, color="black", linewidth=0.8)
        panels[3].invert_yaxis()
        panels[3].tick_params(axis="y", labelsize=6)
        panels[3].set(title=f"kernels, batch of {many}", xlabel="time over the floor")
