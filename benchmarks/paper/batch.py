"""At which batch size does speculation stop paying off?

Tokens per second of autoregressive decoding, a chain of 4 and the 13-node tree A, greedy, on
batches of 1 to 64 (8 on a CPU), interleaved. Acceptance means something with trained weights only.
With any weights, the time of a step relative to an autoregressive one is the acceptance length that
a method needs to break even at that batch size.

    python -m benchmarks.batch [--pair embedded|random] [--batches 1 2 4 8]
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

import stree_jax as st
from benchmarks.common import (
    conclude,
    interleaved,
    machine,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.models import Pair, add_pair_options, chosen_pair, on_gpu
from benchmarks.paper.generation import Program, new_tokens, tau

PLAIN = "autoregressive"
METHODS = {
    PLAIN: None,
    "chain of 4": st.TreeTopology.chain(4),
    "tree A": st.TreeTopology.paper("A"),
}


def measure(
    pair: Pair,
    *,
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Tokens per second and time of a step of each method at each batch size.

    Args:
        pair: target, draft and at least as many prompts as the largest batch.
        batches: numbers of rows.
        tokens: to generate in each row.
        rounds: timed generations.
        progress: a bar for it.
    """
    progress = progress or Progress(disable=True)
    task = progress.add_task("batches", total=len(batches) * (len(METHODS) + rounds))
    drafter = st.ModelDrafter(pair.draft)
    rows = []
    for batch in batches:
        prompts = pair.prompts[:batch]
        runs, starts, ends = {}, {}, {}
        for name, topology in METHODS.items():
            drafting = {} if topology is None else dict(drafter=drafter, topology=topology)
            program = Program(pair.target, prompts, max_new_tokens=tokens, **drafting)
            starts[name] = program.start(prompts)
            runs[name] = functools.partial(program.run, starts[name])
            ends[name] = runs[name]()
            progress.advance(task)
        seconds = interleaved(runs, rounds, lambda: None)
        progress.advance(task, rounds)
        # Steps of the loop, which runs until the last row is done.
        steps = {name: int(end.step.max()) for name, end in ends.items()}
        want = new_tokens(ends[PLAIN], starts[PLAIN])
        for name in METHODS:
            taken = np.array(seconds[name])
            relative = taken / steps[name] * steps[PLAIN] / np.array(seconds[PLAIN])
            rows.append(
                {
                    "batch": batch,
                    "method": name,
                    "tokens_per_second": summary((batch * tokens / taken).tolist()),
                    "milliseconds_a_step": summary((1e3 * taken / steps[name]).tolist()),
                    "tau": tau([ends[name]]),
                    "tau_to_break_even": float(np.median(relative)),
                    "speed_up": summary((np.array(seconds[PLAIN]) / taken).tolist()),
                    "same_tokens": new_tokens(ends[name], starts[name]) == want,
                }
            )
    return rows


def plot(rows: list[dict[str, Any]], trained: bool, path: Path) -> None:
    """Tokens per second, and the acceptance length needed, against the batch size."""
    with plotted(path, 2, 10, 4) as (left, right):
        for name in METHODS:
            part = [row for row in rows if row["method"] == name]
            batches = [row["batch"] for row in part]
            speed = "tokens_per_second" if trained else "milliseconds_a_step"
            medians = [row[speed]["median"] for row in part]
            (line,) = left.plot(batches, medians, marker="o", label=name)
            if name == PLAIN:
                continue
            color = line.get_color()
            needed = [row["tau_to_break_even"] for row in part]
            right.plot(batches, needed, marker="o", color=color, label=f"{name}: needed")
            if trained:
                taus = [row["tau"] for row in part]
                right.plot(batches, taus, "--", color=color, label=f"{name}: measured")
        left.set(ylabel="tokens per second" if trained else "ms a step")
        right.set(ylabel="tau", ylim=0)
        for axes in (left, right):
            axes.set(xlabel="batch", xscale="log")
            axes.set_xticks(batches, map(str, batches))
            axes.minorticks_off()
            axes.legend()


def main() -> None:
    """Measures, prints the table, and writes JSON and plot."""
    sizes = (1, 2, 4, 8, 16, 32, 64) if on_gpu() else (1, 2, 4, 8)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair_options(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=sizes)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = read_options(parser, plots=True)
    pair = chosen_pair(options, max(options.batches))
    with progress_bar() as progress:
        rows = measure(
            pair,
            batches=options.batches,
            tokens=options.tokens,
            rounds=options.rounds,
            progress=progress,
        )
    where = machine()
    same = all(row["same_tokens"] for row in rows)
    exact = pair.target.dtype == jnp.float32
    print_table(
        f"{pair.name}, {where['device']}, {options.tokens} tokens a row ({pair.note()})",
        ("batch", "method", "tokens/s", "ms a step", "speed-up", "tau", "tau to break even"),
        [
            (
                row["batch"],
                row["method"],
                f"{row['tokens_per_second']['median']:,.0f}" if pair.trained else "-",
                row["milliseconds_a_step"]["median"],
                f"{row['speed_up']['median']:.2f}x" if pair.trained else "-",
                f"{row['tau']:.2f}" if pair.trained else "-",
                row["tau_to_break_even"],
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
    path = save("batch", __doc__, results, options.output)
    plot(rows, pair.trained, path.with_suffix(".png"))
    pays = [
        row["batch"]
        for row in rows
        if row["method"] != PLAIN and row["speed_up"]["median"] > 1 and pair.trained
    ]
    conclude(
        "batch",
        passed=same or not exact,
        largest_batch_where_drafts_pay=max(pays, default=None),
        same_tokens=same,
        results=str(path),
    )
