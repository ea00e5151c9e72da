"""The JSON of compiled programs, which keeps the rows of earlier runs."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from stree_jax.measuring.report import write_json

Rows = list[dict[str, Any]]
# The keys of a row of the results; steps have nodes, prompts positions.
ROW = (
    *("preset", "gpu", "tpu", "implementation", "products", "weights"),
    *("nodes", "positions", "loop_nodes", "sampled", "draft", "loop", "mesh"),
)


def write(
    question: str, settings: Mapping[str, Any], tables: Mapping[str, Rows], path: Path
) -> Path:
    """Writes the JSON; rows of earlier runs with the same settings stay unless replaced."""
    settings = {**settings, "jax": jax.__version__}
    with contextlib.suppress(FileNotFoundError):
        earlier = json.loads(path.read_text())
        if earlier.items() >= settings.items():
            old = {name: rows for name, rows in earlier.items() if isinstance(rows, list)}
            tables = {
                name: _merged(old.get(name, []), tables.get(name, [])) for name in {**old, **tables}
            }
    return write_json(path, {"question": question, **settings, **tables})


def _merged(earlier: Rows, new: Rows) -> Rows:
    """The earlier rows that no new row replaces, and then the new rows."""
    replaced = [[row.get(key) for key in ROW] for row in new]
    return [*(row for row in earlier if [row.get(key) for key in ROW] not in replaced), *new]
