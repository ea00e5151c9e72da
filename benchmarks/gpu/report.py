"""Conclusions from the rows of a GPU session: floors, wrong kernels, tables."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.tasks import Row
from stree_jax.measuring.report import Table

STEPS = ("steps", "hybrid", "batch")
CHECKS = ("gate", "correctness")


def rows_of(results: Mapping[str, Any], name: str) -> list[Row]:
    """The rows of a section that were measured."""
    rows = results["sections"].get(name, {}).get("rows", [])
    return [row for row in rows if "failed" not in row]


def annotate(results: dict[str, Any]) -> None:
    """Adds to rows their floor, and the kernels that the checks found wrong.

    Times of a kernel are marked if it was wrong at any shape; steps, if any kernel was.
    """
    speed = max((row["bytes_per_second"] for row in rows_of(results, "bandwidth")), default=None)
    wrong = wrong_kernels(results)
    for name in (*STEPS, "kernels"):
        for row in rows_of(results, name):
            unit, scale = ("microseconds", 1e6) if name == "kernels" else ("milliseconds", 1e3)
            time = [*row[unit].values()][-1]["median"]  # of the kernels
            if speed:
                row[f"floor_{unit}"] = scale * row["bytes"] / speed
                row["kernel_over_floor"] = time / row[f"floor_{unit}"]
            row["xla_over_kernel"] = row[unit]["xla"]["median"] / time
            found = wrong & {row["kernel"]} if name == "kernels" else wrong
            row["wrong"] = ", ".join(sorted(found))


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


def report(results: Mapping[str, Any]) -> None:
    """Prints tables of the measurements, and lists what is missing, failed or wrong."""
    device = (results["machine"] or {}).get("device", "no device")
    for name in STEPS:
        rows = sorted(rows_of(results, name), key=lambda row: (row["nodes"], row["batch"]))
        _times(f"{name}, {device}", rows, "milliseconds", "nodes", "batch")
    which = ("kernel", "shape", "nodes", "batch")
    _times(f"a call of each kernel, {device}", rows_of(results, "kernels"), "microseconds", *which)
    for name, note in results["sections"].items():
        rows = note["rows"]
        print(f"{name}: {note['state']}, {note.get('seconds', 0):.0f} s, {len(rows)} rows")
        if note.get("left_out"):
            print(f"{name} left out: {'; '.join(note['left_out'])}")
        if "failed" in note:
            print(f"{name} failed: {note['failed']}")
        for row in rows:
            if "failed" in row or row.get("right") is False:
                print(f"{name}, {row['task']}: {row.get('failed', 'wrong')}"[:400])


def _times(title: str, rows: list[Row], unit: str, *which: str) -> None:
    """A table of the times of each implementation; kernels that a check found wrong are named."""
    if rows:
        columns = {name: f"{{{name}}}" for name in which}
        columns |= {name: f"{{{unit}[{name}][median]:.3g}}" for name in rows[0][unit]}
        if f"floor_{unit}" in rows[0]:
            columns |= {"floor": f"{{floor_{unit}:.3g}}"}
        Table(f"{title}, {unit}", rows, columns | {"WRONG": "{wrong}"}).show()
