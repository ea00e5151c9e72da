"""At which batch size does speculation stop paying off?

Tokens per second of autoregressive decoding, a chain of 4 and the 13-node tree A, greedy, on
batches of 1 to 64 (8 on a CPU), interleaved. Acceptance means something with trained weights only.
With any weights, the time of a step relative to an autoregressive one is the acceptance length that
a method needs to break even at that batch size.

    python -m benchmarks.batch [--pair embedded|random] [--batches 1 2 4 8]
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks.common import SPEED, Found, Panel, Table, summary
from benchmarks.generation import Program, timed_programs
from benchmarks.methods import CHAIN_OF_4, PAPER_TREES, PLAIN, Method, trees
from benchmarks.models import Pair, chosen_pair, on_gpu

TREES = {"chain of 4": CHAIN_OF_4, "tree A": PAPER_TREES["tree A"]}


def measure(pair: Pair, size: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Tokens per second and time of a step of each method, with one batch of `size` rows."""
    prompts = pair.prompts[:size]
    programs = {
        method.name: Program(pair.target, prompts, max_new_tokens=tokens, **method.options())
        for method in (Method(PLAIN), *trees(st.ModelDrafter(pair.draft), TREES))
    }
    runs = timed_programs(f"batch of {size}", programs, [prompts], rounds)
    # The loop runs until the last row is done.
    milliseconds = {
        name: 1e3 * run.seconds[:, 0] / int(run.ends[0].step.max()) for name, run in runs.items()
    }
    return [
        {
            "batch": size,
            "method": name,
            "milliseconds_a_step": summary(milliseconds[name]),
            "tau_to_break_even": float(np.median(milliseconds[name] / milliseconds[PLAIN])),
        }
        | run.record(runs[PLAIN])
        for name, run in runs.items()
    ]


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Autoregressive decoding, a chain of 4 and tree A, greedy, at each batch size."""
    sizes = options.batches or ([1, 2, 4, 8, 16, 32, 64] if on_gpu() else [1, 2, 4, 8])
    pair = chosen_pair(options, max(sizes))
    rows = [row for n in sizes for row in measure(pair, n, options.tokens, options.rounds)]
    drafts = [row for row in rows if row["method"] != PLAIN]
    speed = "{tokens_per_second[median]}" if pair.trained else "{milliseconds_a_step[median]}"
    needed = {"{method}: needed": "{tau_to_break_even}"}
    needed |= {"{method}: measured": "{tau}"} if pair.trained else {}
    pays = [row["batch"] for row in drafts if row["speed_up"]["median"] > 1 and pair.trained]
    exact = pair.target.dtype == "float32"
    yield Found(
        pair.settings() | {"rows": rows},
        [
            Table(
                f"{pair.name}, {options.tokens} tokens a row ({pair.note()})",
                rows,
                {"batch": "{batch}", "method": "{method}", "tau": "{tau:.2f}"}
                | SPEED
                | {"ms a step": "{milliseconds_a_step[median]:.3g}"}
                | {"tau to break even": "{tau_to_break_even:.2f}"},
            )
        ],
        [
            Panel("batch", "tokens per second, or ms", rows, "{batch}", {"{method}": speed}),
            Panel("batch", "tau", drafts, "{batch}", needed),
        ],
        wrong=[row["method"] for row in rows if exact and not row["same_tokens"]],
        line={"largest_batch_where_drafts_pay": max(pays, default=None)},
    )


if __name__ == "__main__":
    from benchmarks.experiments import main

    main("batch", __doc__)
