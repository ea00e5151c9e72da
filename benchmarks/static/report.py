"""Tables of compiled programs, and their JSON, which keeps the rows of earlier runs."""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import merged, print_table, write_json

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
WHICH = ("preset", "gpu", "implementation", "products")
# The keys of a row of the results; steps have nodes, prompts positions.
ROW = (*WHICH, "nodes", "positions", "loop_nodes", "sampled")


def _print(title: str, rows: Iterable[Row], columns: Mapping[str, str | Callable[[Row], Any]]):
    """A table; a column is a key of the row or a function of it."""

    def cell(row: Row, column: str | Callable[[Row], Any]) -> Any:
        value = row[column] if isinstance(column, str) else column(row)
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value

    columns = {name: name for name in WHICH} | dict(columns)
    cells = [[cell(row, column) for column in columns.values()] for row in rows]
    print_table(title, [*columns], cells)


def _over_floor(cost: Row) -> float:
    return cost["bytes_moved"] / cost["floor_bytes"]


def _whole(name: str, unit: int) -> Callable[[Row], float | str]:
    """A number of the whole model; - if that was not compiled."""
    return lambda row: row["whole"][name] / unit if name in row.get("whole", {}) else "-"


def print_programs(title: str, unit: str, rows: Rows) -> None:
    """A table of the layers of programs, and one of whole programs."""
    layers = (row | cost | {"kind": kind} for row in rows for kind, cost in row["layers"].items())
    columns = {unit: unit, "layer": "kind", "launches": "launches", "copies": "copies"}
    columns |= {"bytes / floor": _over_floor}
    _print(f"A layer of {title} (batch 1, bfloat16)", layers, columns)
    columns = {
        unit: unit,
        "launches": lambda row: row["step"]["launches"],
        "bytes / floor": lambda row: _over_floor(row["step"]),
        "temporary": _whole("temporary_bytes", 2**20),
        "all": _whole("all_bytes", 2**20),
        "record": lambda row: row["step"]["record_bytes"] / 2**20,
        "shared KiB": lambda row: row["shared_memory_bytes"] / 2**10,
        "spills": "spills",
        "trace + lower, s": _whole("trace_seconds", 1),
    }
    _print(f"The whole of {title}; memory in MiB, - without --whole", rows, columns)


def print_loops(loops: Rows, outside: Rows) -> None:
    """A table of decode loops, and one of their launches outside of layers."""
    counts = ("launches", "copies", "host_reads")
    columns = {name.replace("_", " "): f"{name}_a_step" for name in counts} | {"spills": "spills"}
    _print("A step of the loop, one layer of each kind in target and draft", loops, columns)
    columns = {"nodes": "loop_nodes", "sampled": "sampled", "launches": "launches_a_step"}
    columns |= {"spills": "spills"}
    _print("A step of the loop outside of layers; drafts are given", outside, columns)


def write(
    question: str, settings: Mapping[str, Any], tables: Mapping[str, Rows], directory: Path
) -> Path:
    """Writes the JSON; rows of earlier runs with the same settings stay unless replaced."""
    settings = {**settings, "jax": jax.__version__}
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads((directory / "static.json").read_text())
        if earlier.items() >= settings.items():
            tables = {
                name: merged(earlier.get(name, []), rows, ROW) for name, rows in tables.items()
            }
    return write_json("static", {"question": question, **settings, **tables}, directory)
