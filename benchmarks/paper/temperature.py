"""How does acceptance fall with temperature, and which sampling keeps it up (STree, figure 4)?

The embedded pair at temperatures from 0 to 1.3, on a chain of 4 and on tree A: children by noise
that the target shares; drafts tested by traversal verification, with i.i.d. children and multi-step
sampling (the paper's), and without replacement; the top children and target-only verification (the
paper's naive sampling); a beam tree with as many nodes. What follows the target must give the
tokens of autoregressive decoding at every temperature, the others at 0.

    python -m benchmarks.temperature [--prompts 8] [--tokens 96] [--keys 3]
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
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
from benchmarks.models import Pair, embedded_pair
from benchmarks.paper.generation import Program, new_tokens, tau

PLAIN = "autoregressive"
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3)


class Method(NamedTuple):
    """A tree, how its children are sampled, and how they are verified above temperature 0."""

    topology: st.TreeTopology
    child_sampling: str
    verifier: str


METHODS = {
    PLAIN: None,
    "shared noise, chain of 4": Method(st.TreeTopology.chain(4), "shared", "target_only"),
    "traversal, chain of 4": Method(st.TreeTopology.chain(4), "iid", "traversal"),
    "vanilla, chain of 4": Method(st.TreeTopology.chain(4), "iid", "multi_step"),
    "shared noise, tree A": Method(st.TreeTopology.paper("A"), "shared", "target_only"),
    "traversal, tree A": Method(st.TreeTopology.paper("A"), "without_replacement", "traversal"),
    "naive, tree A": Method(st.TreeTopology.paper("A"), "top_k", "target_only"),
    "multi-step, tree A": Method(st.TreeTopology.paper("A"), "iid", "multi_step"),
    "without replacement, tree A": Method(
        st.TreeTopology.paper("A"), "without_replacement", "without_replacement"
    ),
    "naive, 3 beams of 4": Method(st.TreeTopology.beam(3, 4), "beam", "target_only"),
}


def drafting(draft: st.HybridLM, method: Method | None, *, greedy: bool) -> dict[str, Any]:
    """Options of `generate`; at temperature 0 with the top children and greedy verification."""
    if method is None:
        return {}
    if method.child_sampling == "beam":
        drafter: st.Drafter = st.BeamDrafter(draft)
    else:
        drafter = st.ModelDrafter(
            draft, child_sampling="top_k" if greedy else method.child_sampling
        )
    return dict(
        drafter=drafter,
        topology=method.topology,
        verifier="greedy" if greedy else method.verifier,
    )


def measure(
    pair: Pair,
    methods: dict[str, Method | None],
    *,
    temperatures: Sequence[float],
    tokens: int,
    keys: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Acceptance length and speed of each method at each temperature.

    Args:
        pair: target, draft and prompts; all prompts are one batch.
        methods: with `PLAIN` among them.
        temperatures: increasing, from 0 on.
        tokens: to generate in each row.
        keys: number of generations with different random keys, all timed.
        progress: a bar for it.
    """
    progress = progress or Progress(disable=True)
    task = progress.add_task("temperatures", total=len(methods) * (len(temperatures) + 2))
    rows: list[dict[str, Any]] = []
    # Temperature is an argument of the program: one serves all above 0.
    for part in ([t for t in temperatures if t == 0], [t for t in temperatures if t > 0]):
        if not part:
            continue
        programs = {}
        for name, method in methods.items():
            programs[name] = Program(
                pair.target,
                pair.prompts,
                max_new_tokens=tokens,
                temperature=part[0],
                key=jax.random.key(0),
                **drafting(pair.draft, method, greedy=part[0] == 0),
            )
            progress.advance(task)
        follows = {
            name: method is None or method.verifier == "target_only"
            for name, method in methods.items()
        }
        for temperature in part:
            rows += _at(programs, follows, pair.prompts, temperature, keys)
            progress.advance(task, len(methods))
    return rows


def _at(
    programs: dict[str, Program],
    follows: dict[str, bool],
    prompts: list[list[int]],
    temperature: float,
    keys: int,
) -> list[dict[str, Any]]:
    starts = {
        name: [program.start(prompts, jax.random.key(1 + i)) for i in range(keys)]
        for name, program in programs.items()
    }
    above = temperature or None  # a greedy program has no temperature
    ends = {
        name: [program.run(start, above) for start in starts[name]]
        for name, program in programs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(keys):
        runs = {
            name: functools.partial(program.run, starts[name][i], above)
            for name, program in programs.items()
        }
        for name, (taken,) in interleaved(runs, 1, lambda: None).items():
            seconds[name].append(taken)
    emitted = {name: [int(e.statistics.emitted.sum()) for e in ends[name]] for name in programs}
    speed = {name: np.divide(emitted[name], seconds[name]) for name in programs}
    outputs = {
        name: [new_tokens(e, s) for s, e in zip(starts[name], ends[name], strict=True)]
        for name in programs
    }
    return [
        {
            "method": name,
            "temperature": temperature,
            "tau": tau(ends[name]),
            "tau_by_key": [tau([end]) for end in ends[name]],
            "tokens_per_second": summary(speed[name].tolist()),
            "speed_up": summary((speed[name] / speed[PLAIN]).tolist()),
            # Rules that test drafts have random numbers of their own.
            "same_tokens": outputs[name] == outputs[PLAIN]
            if temperature == 0 or follows[name]
            else None,
        }
        for name in programs
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Acceptance length and speed against temperature."""
    with plotted(path, 2, 11, 4.5) as (left, right):
        for name in dict.fromkeys(row["method"] for row in rows):
            part = [row for row in rows if row["method"] == name]
            temperatures = [row["temperature"] for row in part]
            speeds = [row["tokens_per_second"]["median"] for row in part]
            lowest = [min(row["tau_by_key"]) for row in part]
            highest = [max(row["tau_by_key"]) for row in part]
            (line,) = left.plot(temperatures, [row["tau"] for row in part], marker="o", label=name)
            left.fill_between(temperatures, lowest, highest, alpha=0.2, color=line.get_color())
            right.plot(temperatures, speeds, marker="o")
        left.set(xlabel="temperature", ylabel="tau; band: lowest and highest of the keys")
        right.set(xlabel="temperature", ylabel="tokens per second, whole batch", ylim=0)
        left.legend()


def main() -> None:
    """Measures, prints the table, and writes JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--keys", type=int, default=5)
    options = read_options(parser, plots=True)
    pair = embedded_pair(options.prompts)
    with progress_bar() as progress:
        rows = measure(
            pair,
            METHODS,
            temperatures=TEMPERATURES,
            tokens=options.tokens,
            keys=options.keys,
            progress=progress,
        )
    where = machine()
    for title, value in (
        ("tau", lambda row: f"{row['tau']:.2f}"),
        ("speed-up", lambda row: f"{row['speed_up']['median']:.2f}x"),
    ):
        print_table(
            f"{title} by temperature, {pair.name}, batch of {options.prompts}, {where['device']}",
            ("method", *map(str, TEMPERATURES)),
            [(name, *(value(row) for row in rows if row["method"] == name)) for name in METHODS],
        )
    same = all(row["same_tokens"] is not False for row in rows)
    results = pair.settings() | {
        "machine": where,
        "batch": options.prompts,
        "tokens": options.tokens,
        "keys": options.keys,
        "rows": rows,
    }
    path = save("temperature", __doc__, results, options.output)
    plot(rows, path.with_suffix(".png"))
    hottest = {row["method"]: round(row["tau"], 3) for row in rows if row["temperature"] == 1}
    conclude("temperature", passed=same, tau_at_1=hottest, same_tokens=same, results=str(path))
