"""Tables of what was compiled, and the JSON with what earlier runs found."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import merged, print_table, write_json

Rows = list[dict[str, Any]]
# What identifies a row of the results; steps have nodes, prompts positions.
ROW = ("preset", "gpu", "implementation", "products", "nodes", "positions", "loop_nodes", "sampled")


def yes(value: bool) -> str:
    """A word for a cell of a table."""
    return "yes" if value else "no"


def print_programs(title: str, unit: str, rows: Rows) -> None:
    """A table of the layers of programs, and one of whole programs."""
    which = ("preset", "gpu", "implementation", "products", unit)
    print_table(
        f"A layer of {title} (batch 1, bfloat16)",
        (*which, "layer", "launches", "copies", "bytes / floor"),
        [
            (
                *(row[name] for name in which),
                kind,
                cost["launches"],
                cost["copies"],
                cost["bytes_moved"] / cost["floor_bytes"],
            )
            for row in rows
            for kind, cost in row["layers"].items()
        ],
    )
    print_table(
        f"The whole of {title}; memory in MiB, - without --whole",
        (
            *(*which, "launches", "bytes / floor", "temporary", "all", "record"),
            *("shared KiB", "spills", "trace + lower, s"),
        ),
        [
            (
                *(row[name] for name in which),
                row["step"]["launches"],
                row["step"]["bytes_moved"] / row["step"]["floor_bytes"],
                *_whole(row, "temporary_bytes", 2**20),
                *_whole(row, "all_bytes", 2**20),
                row["step"]["record_bytes"] / 2**20,
                row["shared_memory_bytes"] / 2**10,
                yes(row["spills"]),
                *_whole(row, "trace_seconds", 1),
            )
            for row in rows
        ],
    )


def _whole(row: Mapping[str, Any], name: str, unit: int) -> tuple[float | str]:
    """A number of the whole model, if that was compiled; - for rows of older versions."""
    value = row.get("whole", {}).get(name)
    return ("-" if value is None else value / unit,)


def print_loops(rows: Rows) -> None:
    """A table of decode loops."""
    which = ("preset", "gpu", "implementation", "products")
    counts = ("launches", "copies", "host_reads")
    print_table(
        "A step of the loop, one layer of each kind in target and draft",
        (*which, *(name.replace("_", " ") for name in counts), "spills"),
        [
            (
                *(row[name] for name in which),
                *(row[f"{name}_a_step"] for name in counts),
                yes(row["spills"]),
            )
            for row in rows
        ],
    )


def print_outside(rows: Rows) -> None:
    """A table of what loops launch outside of layers."""
    which = ("preset", "gpu", "implementation", "products")
    print_table(
        "A step of the loop outside of layers; drafts are given",
        (*which, "nodes", "sampled", "launches", "spills"),
        [
            (
                *(row[name] for name in which),
                row["loop_nodes"],
                yes(row["sampled"]),
                row["launches_a_step"],
                yes(row["spills"]),
            )
            for row in rows
        ],
    )


def write(settings: Mapping[str, Any], tables: Mapping[str, Rows], directory: Path) -> Path:
    """Writes the JSON; rows of earlier runs with the same settings stay unless replaced."""
    settings = {**settings, "jax": jax.__version__}
    tables = dict(tables)
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads((directory / "static.json").read_text())
        if earlier.items() >= settings.items():
            tables = {
                name: merged(earlier.get(name, []), rows, ROW) for name, rows in tables.items()
            }
    return write_json("static", {**settings, **tables}, directory)
