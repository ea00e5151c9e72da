"""Speed by batch size. The experiment `benchmarks.batch`."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks.common import Found, Panel, Table, summary
from benchmarks.methods import CHAIN_OF_4, PAPER_TREES, PLAIN, Method, lines, trees
from benchmarks.models import Pair, chosen_pair, on_gpu
from benchmarks.paper.generation import Program, new_tokens, tau, timed_programs

TREES = {"chain of 4": CHAIN_OF_4, "tree A": PAPER_TREES["tree A"]}


def measure(pair: Pair, size: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Tokens per second and time of a step of each method, with one batch of `size` rows."""
    methods = [Method(PLAIN), *trees(st.ModelDrafter(pair.draft), TREES)]
    prompts = pair.prompts[:size]
    programs = {
        method.name: Program(pair.target, prompts, max_new_tokens=tokens, **method.options())
        for method in methods
    }
    starts = {name: [program.start(prompts)] for name, program in programs.items()}
    ends, seconds = timed_programs(f"batch of {size}", programs, starts, rounds)
    # Steps of the loop, which runs until the last row is done.
    steps = {name: int(end.step.max()) for name, (end,) in ends.items()}
    texts = {name: new_tokens(ends[name][0], starts[name][0]) for name in programs}
    rows = []
    for name in programs:
        taken, plain = seconds[name][:, 0], seconds[PLAIN][:, 0]
        relative = taken / steps[name] * steps[PLAIN] / plain
        rows.append(
            {
                "batch": size,
                "method": name,
                "tokens_per_second": summary((size * tokens / taken).tolist()),
                "milliseconds_a_step": summary((1e3 * taken / steps[name]).tolist()),
                "tau": tau(ends[name]),
                "tau_to_break_even": float(np.median(relative)),
                "speed_up": summary((plain / taken).tolist()),
                "same_tokens": texts[name] == texts[PLAIN],
            }
        )
    return rows


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Autoregressive decoding, a chain of 4 and tree A, greedy, at each batch size."""
    sizes = options.batches or ([1, 2, 4, 8, 16, 32, 64] if on_gpu() else [1, 2, 4, 8])
    pair = chosen_pair(options, max(sizes))
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows += measure(pair, size, options.tokens, options.rounds)
    drafts = [row for row in rows if row["method"] != PLAIN]
    speed = "{tokens_per_second[median]}" if pair.trained else "{milliseconds_a_step[median]}"
    needed = lines(drafts, "{method}: needed", "{batch}", "{tau_to_break_even}")
    if pair.trained:
        needed |= lines(drafts, "{method}: measured", "{batch}", "{tau}")
    pays = [row["batch"] for row in drafts if row["speed_up"]["median"] > 1 and pair.trained]
    exact = pair.target.dtype == "float32"
    yield Found(
        pair.settings() | {"rows": rows},
        [
            Table(
                f"{pair.name}, {options.tokens} tokens a row ({pair.note()})",
                rows,
                {"batch": "{batch}", "method": "{method}"}
                | {"tokens/s": "{tokens_per_second[median]:,.0f}", "tau": "{tau:.2f}"}
                | {"ms a step": "{milliseconds_a_step[median]:.3g}"}
                | {"speed-up": "{speed_up[median]:.2f}x"}
                | {"tau to break even": "{tau_to_break_even:.2f}"},
            )
        ],
        [
            Panel("batch", "tokens per second, or ms", lines(rows, "{method}", "{batch}", speed)),
            Panel("batch", "tau", needed),
        ],
        wrong=[row["method"] for row in rows if exact and not row["same_tokens"]],
        line={"largest_batch_where_drafts_pay": max(pays, default=None)},
    )
