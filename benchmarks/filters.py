"""What does a step cost with top-k or top-p, against one that samples from all tokens?

The embedded pair at temperature 1, one sequence: decoding without drafts, with a chain of 4 and
with tree A. Texts differ between filters, so seconds are per step. Rounds are interleaved.

    python -m benchmarks.filters [--tokens 192] [--rounds 15] [--output DIR | --commit]
"""

import argparse
from typing import Any

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import (
    conclude,
    interleaved,
    machine,
    print_table,
    read_options,
    save,
    summary,
)
from benchmarks.models import Pair, embedded_pair
from benchmarks.paper.generation import Program

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 8": {"top_k": 8},
    "both": {"top_p": 0.9, "top_k": 8},
}
LIMIT = 1.15  # a step with top-p against one without


def measure(pair: Pair, *, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step by tree and filter, relative to no filter, by rounds."""
    drafter = st.ModelDrafter(pair.draft)
    trees = {
        "no drafts": {},
        "chain of 4": dict(drafter=drafter, topology=st.TreeTopology.chain(4)),
        "tree A": dict(drafter=drafter, topology=st.TreeTopology.paper("A")),
    }
    programs, states, steps = {}, {}, {}
    for tree, drafting in trees.items():
        for name, options in FILTERS.items():
            which = tree, name
            programs[which] = Program(
                pair.target,
                pair.prompts[:1],
                max_new_tokens=tokens,
                temperature=1.0,
                key=jax.random.key(1),
                **options,
                **drafting,
            )
            states[which] = programs[which].start(pair.prompts[:1])
            end = programs[which].run(states[which])
            steps[which] = int(end.statistics.target_calls.sum())
    calls = {
        f"{tree}, {name}": (lambda which=(tree, name): programs[which].run(states[which]))
        for tree, name in programs
    }
    seconds = interleaved(calls, rounds, lambda: None)
    per_step = {
        which: np.array(seconds[f"{which[0]}, {which[1]}"]) / steps[which] for which in programs
    }
    return [
        {
            "tree": tree,
            "filter": name,
            "milliseconds_of_a_step": summary((1e3 * per_step[tree, name]).tolist()),
            "relative": summary((per_step[tree, name] / per_step[tree, "none"]).tolist()),
        }
        for tree, name in programs
    ]


def main() -> None:
    """Measures, prints the table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=15)
    options = read_options(parser)
    where = machine()  # before anything loads it
    pair = embedded_pair(1)
    rows = measure(pair, tokens=options.tokens, rounds=options.rounds)
    print_table(
        f"a step at temperature 1, {pair.name}, {where['device']}",
        ("tree", "filter", "ms", "relative"),
        [
            (
                row["tree"],
                row["filter"],
                f"{row['milliseconds_of_a_step']['median']:.2f}",
                f"{row['relative']['median']:.3f}",
            )
            for row in rows
        ],
    )
    results = pair.settings() | {
        "machine": where,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "rows": rows,
    }
    path = save("filters", __doc__, results, options.output)
    worst = max(row["relative"]["median"] for row in rows if "top-p" in row["filter"])
    conclude("filters", top_p=round(worst, 3), within_limit=worst <= LIMIT, results=str(path))


if __name__ == "__main__":
    main()
