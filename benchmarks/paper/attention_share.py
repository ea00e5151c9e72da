"""Targets with more or fewer attention layers. The experiment `benchmarks.attention_share`."""

import argparse
from collections.abc import Iterator

import stree_jax as st
from benchmarks import methods
from benchmarks.common import Found, Panel, Table
from benchmarks.methods import CHAIN_OF_4, PAPER_TREES, PLAIN, Method
from benchmarks.models import loaded_pair
from benchmarks.steps import COLUMNS, time_of_calls

SHARES = (0, 25, 50)
TREES = {"chain of 4": CHAIN_OF_4, "tree A": PAPER_TREES["tree A"]}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """A chain and a tree with each pair, and the costs of target calls."""
    names = [f"attention-{share}{end}" for share in SHARES for end in ("", "-draft")]
    if missing := [name for name in names if not (options.directory / name).is_dir()]:
        raise SystemExit(f"{options.directory} lacks {', '.join(missing)}; see --help")
    rows, steps = [], []
    for share in SHARES:
        path = str(options.directory / f"attention-{share}")
        pair = loaded_pair(path, f"{path}-draft", f"{share} % attention", options.prompts, None)
        ways = [Method(PLAIN), *methods.trees(st.ModelDrafter(pair.draft), TREES)]
        for row in methods.compare(pair, ways, options.temperatures, options):
            rows.append({"attention_percent": share} | row)
        steps.append(time_of_calls(pair.name, pair.target, 50))
    label, x = "{method}, T = {temperature:g}", "{attention_percent}"
    at_0 = [row for row in rows if row["method"] == "tree A" and row["temperature"] == 0]
    yield Found(
        {"prompts": pair.source, "decoding": rows, "target_calls": steps},
        [
            *methods.method_tables(pair.source, rows, **{"attention, %": x}),
            Table("Milliseconds of a call (one node = 1)", steps, COLUMNS),
        ],
        [
            Panel("attention layers, %", "tau", rows, x, {label: "{tau}"}),
            Panel("attention layers, %", "speed-up", rows, x, {label: "{speed_up[median]}"}),
        ],
        wrong=methods.different(rows),
        line={"tau": {f"{row['attention_percent']} %": round(row["tau"], 3) for row in at_0}},
    )
