"""Acceptance by temperature and way of sampling. The experiment `benchmarks.temperature`."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import stree_jax as st
from benchmarks.common import Found, Panel, Table
from benchmarks.methods import CHAIN_OF_4, PAPER_TREES, PLAIN, Method
from benchmarks.models import Pair, embedded_pair
from benchmarks.paper.generation import Program, timed_programs

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3)
# Tree, how children are sampled, and how they are verified above temperature 0.
WAYS = {
    "shared noise, chain of 4": ("chain", "shared", "target_only"),
    "traversal, chain of 4": ("chain", "iid", "traversal"),
    "vanilla, chain of 4": ("chain", "iid", "multi_step"),
    "shared noise, tree A": ("A", "shared", "target_only"),
    "traversal, tree A": ("A", "without_replacement", "traversal"),
    "naive, tree A": ("A", "top_k", "target_only"),
    "multi-step, tree A": ("A", "iid", "multi_step"),
    "without replacement, tree A": ("A", "without_replacement", "without_replacement"),
}
TREES = {"chain": CHAIN_OF_4, "A": PAPER_TREES["tree A"]}


def methods(draft: st.HybridLM, *, greedy: bool) -> list[Method]:
    """All ways; at temperature 0 with the top children and greedy verification."""
    found = [Method(PLAIN)]
    for name, (tree, sampling, verifier) in WAYS.items():
        drafter = st.ModelDrafter(draft, child_sampling="top_k" if greedy else sampling)
        found.append(Method(name, drafter, TREES[tree], "greedy" if greedy else verifier))
    beams, verifier = st.TreeTopology.beam(3, 4), "greedy" if greedy else "target_only"
    return [*found, Method("naive, 3 beams of 4", st.BeamDrafter(draft), beams, verifier)]


def measure(
    pair: Pair, methods: Sequence[Method], temperatures: Sequence[float], tokens: int, keys: int
) -> list[dict[str, Any]]:
    """Tau and speed of each method at temperatures that share a program: only 0, or all above 0."""
    sampling = {"temperature": temperatures[0], "key": jax.random.key(0)}
    programs = {
        method.name: Program(
            pair.target, pair.prompts, max_new_tokens=tokens, **sampling, **method.options()
        )
        for method in methods
    }
    requests = [(pair.prompts, jax.random.key(1 + i)) for i in range(keys)]
    rows = []
    for temperature in temperatures:
        title, above = f"temperature {temperature:g}", temperature or None
        runs = timed_programs(title, programs, requests, 1, above)
        for method in methods:
            run = runs[method.name]
            by_key = run.counts("emitted") / run.counts("target_calls")
            row = {"method": method.name, "temperature": temperature}
            row |= {"tau_by_key": by_key.tolist()} | run.record(runs[PLAIN])
            if not method.follows_target:  # rules that test drafts have their own random numbers
                row["same_tokens"] = None
            rows.append(row)
    return rows


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All ways at temperatures from 0 to 1.3."""
    pair = embedded_pair(options.prompts)
    size = (options.tokens, options.keys)
    rows = measure(pair, methods(pair.draft, greedy=True), TEMPERATURES[:1], *size)
    rows += measure(pair, methods(pair.draft, greedy=False), TEMPERATURES[1:], *size)
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        number = TEMPERATURES.index(row["temperature"])
        by_name.setdefault(row["method"], {"method": row["method"]})[f"at {number}"] = row
    forms = {"tau": "[tau]:.2f}", "speed-up": "[speed_up][median]:.2f}x"}
    panels = {"tau": "{tau}", "tokens per second": "{tokens_per_second[median]}"}
    at_1 = {row["method"]: round(row["tau"], 3) for row in rows if row["temperature"] == 1}
    yield Found(
        pair.settings() | {"batch": options.prompts, "rows": rows},
        [
            Table(
                f"{title} by temperature, {pair.name}, batch of {options.prompts}",
                [*by_name.values()],
                {"method": "{method}"}
                | {f"{t:g}": f"{{at {number}{form}" for number, t in enumerate(TEMPERATURES)},
            )
            for title, form in forms.items()
        ],
        [
            Panel("temperature", title, rows, "{temperature}", {"{method}": form})
            for title, form in panels.items()
        ],
        wrong=[row["method"] for row in rows if row["same_tokens"] is False],
        line={"tau_at_1": at_1},
    )
