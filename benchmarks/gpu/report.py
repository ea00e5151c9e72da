"""Conclusions from the rows of a GPU session: floors, wrong kernels, aims, tables."""

from collections.abc import Mapping
from typing import Any

from benchmarks.common import Table, print_table
from benchmarks.gpu.tasks import Row
from benchmarks.tree_size import VANILLA, fits

STEPS = ("steps", "hybrid", "batch")
CHECKS = ("gate", "correctness")


def rows_of(results: Mapping[str, Any], name: str) -> list[Row]:
    """The rows of a section that were measured."""
    rows = results["sections"].get(name, {}).get("rows", [])
    return [row for row in rows if "failed" not in row or "microseconds" in row]


def kernels_time(times: Mapping[str, Mapping[str, float]]) -> float | None:
    """The median time of our kernels, if it was measured."""
    found = [times[name]["median"] for name in ("pallas", "pallas_interpret") if name in times]
    return found[0] if found else None


def annotate(results: dict[str, Any]) -> None:
    """Adds to rows their floor, and the kernels that the checks found wrong.

    Times of a kernel are marked if it was wrong at any shape; steps, if any kernel was.
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
        times = {row["nodes"]: kernels_time(row["milliseconds"]) for row in rows_of(results, name)}
        sizes = [
            {"nodes": nodes, "milliseconds": {"median": time}}
            for nodes, time in sorted(times.items())
            if time
        ]
        if len(sizes) > 3 and times.get(VANILLA):
            results["sections"][name]["fits"] = fits(sizes)


def wrong_kernels(results: Mapping[str, Any]) -> set[str]:
    """The kernels that a check found wrong, or that crashed in it."""
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
    """Number of tasks that did not fit into the time."""
    return sum(len(section.get("left_out", [])) for section in results["sections"].values())


def aims(results: Mapping[str, Any]) -> dict[str, dict[str, float | bool]]:
    """The aims for an H200, and whether the measurements meet them."""
    steps = {row["nodes"]: row for row in rows_of(results, "steps")}
    times = {nodes: kernels_time(row["milliseconds"]) for nodes, row in steps.items()}
    tables = rows_of(results, "packed")
    largest: Row = max(tables, key=lambda row: row["nodes"], default={})
    ratios = [row.get("xla_over_kernel") for row in rows_of(results, "batch")]
    one, many = times.get(1), times.get(63)
    at_most = {
        "one node of mamba2-2.7b over the floor": (steps.get(1, {}).get("kernel_over_floor"), 1.5),
        "63 nodes of mamba2-2.7b over one": (many / one if many and one else None, 1.3),
    }
    at_least = {
        "unrolled over packed": (largest.get("packed_is_faster_by"), 2.0),
        "XLA over our kernels, worst batch": (min(filter(None, ratios), default=None), 1.0),
    }
    return {
        name: {
            "measured": value,
            "aim": aim,
            "met": value <= aim if name in at_most else value >= aim,
        }
        for name, (value, aim) in (at_most | at_least).items()
        if value is not None
    }


def report(results: Mapping[str, Any]) -> None:
    """Prints tables of the measurements, and lists what is missing, failed or wrong."""
    device = (results["machine"] or {}).get("device", "no device")
    for name in STEPS:
        rows = sorted(rows_of(results, name), key=lambda row: (row["nodes"], row["batch"]))
        _times(f"{name}, {device}", rows, "milliseconds", "nodes", "batch")
    which = ("kernel", "shape", "nodes", "batch")
    _times(f"a call of each kernel, {device}", rows_of(results, "kernels"), "microseconds", *which)
    sections = [
        {"seconds": 0.0}
        | note
        | {"section": name, "count": len(note["rows"]), "out": len(note.get("left_out", []))}
        | {"bad": sum("failed" in row for row in note["rows"])}
        for name, note in results["sections"].items()
    ]
    columns = {"section": "{section}", "state": "{state}", "took, s": "{seconds}"}
    columns |= {"rows": "{count}", "left out": "{out}", "failed": "{bad}"}
    Table("sections", sections, columns).show()
    for name, note in results["sections"].items():
        if note.get("left_out"):
            print(f"{name} left out: {'; '.join(note['left_out'])}")
        if "failed" in note:
            print(f"{name} failed: {note['failed']}")
        for row in note["rows"]:
            if "failed" in row or row.get("right") is False:
                print(f"{name}, {row['task']}: {row.get('failed', 'wrong')}"[:400])


def _times(title: str, rows: list[Row], unit: str, *which: str) -> None:
    """A table of the times of each contender; kernels that a check found wrong are named."""
    if not rows:
        return
    kinds = [*dict.fromkeys(kind for row in rows for kind in row[unit])]

    def cells(row: Row) -> list[str]:
        medians = [row[unit].get(kind, {}).get("median") for kind in kinds]
        numbers = (*medians, row.get(f"floor_{unit}"))
        shown = ["-" if number is None else f"{number:.3g}" for number in numbers]
        return [*(str(row[field]) for field in which), *shown, ", ".join(row["wrong"])]

    print_table(f"{title}, {unit}", [*which, *kinds, "floor", "WRONG"], [*map(cells, rows)])
