"""How does the share of attention layers change acceptance and speed (STree, table 4)?

Decodes the same prompts with targets of 0, 25 and 50 % attention layers, each with a draft that was
distilled from it: autoregressively, with a chain and with a tree, at temperature 0 and 1. Sizes and
training are the same, see `benchmarks/recipes`. Train the pairs first (minutes each):

    for share in 0 25 50; do
        stree-jax train benchmarks/recipes/attention-$share.toml DIR/attention-$share
        stree-jax distill benchmarks/recipes/attention-draft.toml \
            DIR/attention-$share DIR/attention-$share-draft
    done
    python -m benchmarks.attention_share DIR [--prompts 12] [--tokens 64] [--rounds 3]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import stree_jax as st
from benchmarks import methods
from benchmarks.common import Found, main
from benchmarks.methods import COMPARED, TWO_TREES
from benchmarks.models import loaded_pair
from benchmarks.steps import COLUMNS, time_of_calls
from stree_jax.measuring.methods import PLAIN, Method, different
from stree_jax.measuring.report import Table, method_tables

OPTIONS = COMPARED | {"directory": {"type": Path}, "--prompts": 12, "--tokens": 64}

SHARES = (0, 25, 50)


def run(options: argparse.Namespace) -> Iterator[Found]:
    """A chain and a tree with each pair, and the costs of target calls."""
    names = [f"attention-{share}{end}" for share in SHARES for end in ("", "-draft")]
    if missing := [name for name in names if not (options.directory / name).is_dir()]:
        raise SystemExit(f"{options.directory} lacks {', '.join(missing)}; see --help")
    rows, steps = [], []
    for share in SHARES:
        path = str(options.directory / f"attention-{share}")
        pair = loaded_pair(path, f"{path}-draft", f"{share} % attention", options.prompts)
        ways = [Method(PLAIN), *methods.trees(st.ModelDrafter(pair.draft), TWO_TREES)]
        for temperature in options.temperatures:
            found = methods.compare(pair, ways, temperature, options)
            rows += [{"attention_percent": share} | row for row in found]
        steps.append(time_of_calls(pair.name, pair.target, 50))
    at_0 = [row for row in rows if row["method"] == "tree A" and row["temperature"] == 0]
    yield Found(
        {"prompts": pair.source, "decoding": rows, "target_calls": steps},
        [
            *method_tables(pair.source, rows, **{"attention, %": "{attention_percent}"}),
            Table("Milliseconds of a call (one node = 1)", steps, COLUMNS),
        ],
        wrong=different(rows),
        line={"tau": {f"{row['attention_percent']} %": round(row["tau"], 3) for row in at_0}},
    )


if __name__ == "__main__":
    main(run, OPTIONS)
