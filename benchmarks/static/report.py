"""Tables of compiled programs, and their JSON, which keeps the rows of earlier runs."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import Table, write_json

Rows = list[dict[str, Any]]
WHICH = ("preset", "gpu", "implementation", "products")
# The keys of a row of the results; steps have nodes, prompts positions.
ROW = (*WHICH, "nodes", "positions", "loop_nodes", "sampled")


def show(title: str, rows: Rows, **columns: str) -> None:
    """Prints a table of programs, if there are any."""
    if rows:
        Table(title, rows, {name: f"{{{name}}}" for name in WHICH} | columns).show()


def print_programs(title: str, unit: str, rows: Rows) -> None:
    """A table of the layers of programs, one of their sums, and one of programs with `--whole`."""
    layers = [row | cost | {"kind": kind} for row in rows for kind, cost in row["layers"].items()]
    size = {unit: f"{{{unit}}}"}
    counts = {name: f"{{{name}:g}}" for name in ("launches", "copies")}
    show(f"A layer of {title} (batch 1, bfloat16)", layers, **size, layer="{kind}", **counts)
    sums = [row | row["step"] for row in rows]
    more = {"shared memory": "{shared_memory_bytes:,}", "spills": "{spills}"}
    show(f"The sum of {title}", sums, **size, **counts, **more)
    memory = {name: f"{{whole[{name}_bytes]:,}}" for name in ("temporary", "all")}
    whole = [row for row in rows if "whole" in row]
    show(f"Memory of {title}, bytes", whole, **size, **memory)


def write(
    question: str, settings: Mapping[str, Any], tables: Mapping[str, Rows], directory: Path
) -> Path:
    """Writes the JSON; rows of earlier runs with the same settings stay unless replaced."""
    settings = {**settings, "jax": jax.__version__}
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads((directory / "static.json").read_text())
        if earlier.items() >= settings.items():
            tables = {name: _merged(earlier.get(name, []), new) for name, new in tables.items()}
    return write_json("static", {"question": question, **settings, **tables}, directory)


def _merged(earlier: Rows, new: Rows) -> Rows:
    """The earlier rows that no new row replaces, and then the new rows."""
    replaced = [[row.get(key) for key in ROW] for row in new]
    return [*(row for row in earlier if [row.get(key) for key in ROW] not in replaced), *new]
