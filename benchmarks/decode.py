"""How fast is tree decoding of a pair on this machine, and how many drafts are accepted?

Decodes the same prompts one at a time with every method, among them the tree that `tune-tree` found
for the embedded pair and dynamic trees of its size, interleaved prompt by prompt, at
temperature 0 and 1; checks that all methods give the same tokens with the same key. Then measures
how the time of a target call grows with the tree, which decides whether speculation pays off.

    python -m benchmarks.decode [--prompts 16] [--tokens 96] [--rounds 3]
        [--output DIR | --commit]                   default: benchmark-results; benchmarks/results
        [--target DIR --draft DIR --name NAME]      instead of the embedded pair
"""

import argparse
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from rich.progress import Progress, TaskID

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
from benchmarks.prompts import load_prompts
from benchmarks.steps import run_steps
from stree_jax.cli.trees import parse_tree
from stree_jax.convert import find

TREE_NAMES = "ABCDE"


class Method(NamedTuple):
    """One way to decode."""

    name: str
    drafter: st.Drafter | None
    topology: st.TreeTopology | None


def methods(draft: st.HybridLM, tuned: Path | None) -> list[Method]:
    """The paper's baselines and trees, prompt lookup, and what `tune-tree` wrote for the pair."""
    drafter = st.ModelDrafter(draft)
    ways = [
        Method("autoregressive", None, None),
        Method("chain of 4", drafter, st.TreeTopology.chain(4)),
    ]
    tree = None if tuned is None else parse_tree(f"@{tuned}")
    if tuned is not None and tree is not None:
        dynamic = st.DynamicDrafter(draft, sharpness=json.loads(tuned.read_text())["sharpness"])
        ways += [
            Method("tuned tree", drafter, tree),
            Method("dynamic tree", dynamic, st.TreeTopology.budget(tree.num_nodes, tree.depth)),
        ]
    return [
        *ways,
        Method("prompt lookup, chain of 4", st.NgramDrafter(), st.TreeTopology.chain(4)),
        *(Method(f"tree {name}", drafter, st.TreeTopology.paper(name)) for name in TREE_NAMES),
    ]


def measure_decoding(
    target: st.HybridLM,
    ways: list[Method],
    prompts: list[list[int]],
    *,
    tokens: int,
    temperature: float,
    rounds: int,
    progress: Progress,
    task: TaskID,
) -> list[dict]:
    """Tokens per second, tau and equality of each method; `decoding_calls` ticks of the bar."""

    def decode(way: Method, prompt: list[int]) -> st.Generation:
        return st.generate(
            target,
            [prompt],
            max_new_tokens=tokens,
            drafter=way.drafter,
            topology=way.topology,
            temperature=temperature,
            key=jax.random.key(0),
        )

    progress.update(task, description=f"temperature {temperature:g}")
    outputs = {}
    for way in ways:
        outputs[way.name] = [decode(way, prompt) for prompt in prompts]
        progress.advance(task, len(prompts))
    times = {way.name: np.zeros((rounds, len(prompts))) for way in ways}
    for number in range(rounds):
        for i, prompt in enumerate(prompts):
            calls = {way.name: functools.partial(decode, way, prompt) for way in ways}
            for name, (seconds,) in interleaved(calls, 1, lambda: progress.advance(task)).items():
                times[name][number, i] = seconds
    speeds = {
        name: sum(out.stats.num_tokens for out in outputs[name]) / seconds.sum(axis=1)
        for name, seconds in times.items()
    }

    rows = []
    plain = outputs["autoregressive"]
    for way in ways:
        mine = outputs[way.name]
        calls = sum(out.stats.num_target_calls for out in mine)
        ratio = speeds[way.name] / speeds["autoregressive"]
        rows.append(
            {
                "method": way.name,
                "temperature": temperature,
                "nodes": 1 if way.topology is None else way.topology.num_nodes,
                "tokens_per_second": summary(speeds[way.name]),
                "tokens_per_second_by_round": speeds[way.name].tolist(),
                "seconds_by_prompt": np.median(times[way.name], axis=0).tolist(),
                "speed_up": summary(ratio),
                "tau": sum(out.stats.num_tokens for out in mine) / calls,
                "accepted_per_depth": [
                    round(float(count) / calls, 4)
                    for count in sum(out.stats.accepted_per_depth for out in mine)
                ],
                "identical": all(
                    np.array_equal(a.tokens, b.tokens) for a, b in zip(mine, plain, strict=True)
                ),
            }
        )
    return rows


def decoding_calls(ways: list[Method], prompts: list, rounds: int) -> int:
    """Generations of `measure_decoding`."""
    return len(ways) * len(prompts) * (1 + rounds)


SIZES = {
    tree.num_nodes: tree
    for tree in (*map(st.TreeTopology.chain, (0, 1, 4)), *map(st.TreeTopology.paper, "AB"))
}
STEP_ROUNDS = 5
STEP_CALLS = len(SIZES) * (1 + STEP_ROUNDS)  # timed calls of `measure_steps`


def measure_steps(
    name: str, model: st.HybridLM, *, count: int, progress: Progress, task: TaskID
) -> dict:
    """Milliseconds of a target call against the number of nodes; `STEP_CALLS` ticks of the bar."""
    progress.update(task, description=f"target call, {name}")

    def run(topology: st.TreeTopology) -> None:
        run_steps(model, topology, count).block_until_ready()

    for topology in SIZES.values():
        run(topology)
        progress.advance(task)
    calls = {str(nodes): functools.partial(run, tree) for nodes, tree in SIZES.items()}
    seconds = interleaved(calls, STEP_ROUNDS, lambda: progress.advance(task))
    milliseconds = {
        nodes: summary([1e3 * value / count for value in values])
        for nodes, values in seconds.items()
    }
    return {
        "model": name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))),
        "milliseconds_by_nodes": milliseconds,
        "relative_to_one_node": {
            nodes: value["median"] / milliseconds["1"]["median"]
            for nodes, value in milliseconds.items()
        },
    }


def plot(rows: list[dict], steps: list[dict], path: Path) -> None:
    """Speed-up by method and temperature; time of a target call by nodes."""
    with plotted(path, 2, 13, 4.5) as (left, right):
        names = list(dict.fromkeys(row["method"] for row in rows))
        for offset, temperature in ((-0.2, 0.0), (0.2, 1.0)):
            part = [row for row in rows if row["temperature"] == temperature]
            bars = left.bar(
                np.arange(len(names)) + offset,
                [row["speed_up"]["median"] for row in part],
                width=0.38,
                label=f"temperature {temperature:g}",
            )
            left.bar_label(bars, [f"{row['tau']:.2f}" for row in part], fontsize=8)
        left.axhline(1, color="black", linewidth=0.8)
        left.set_xticks(range(len(names)), names, rotation=35, ha="right")
        left.set(ylabel="tokens per second, autoregressive = 1", title="Speed; tau above the bars")
        for step in steps:
            ratios = step["relative_to_one_node"]
            right.plot([*map(int, ratios)], ratios.values(), marker="o", label=step["model"])
        right.set(
            xlabel="tree nodes",
            ylabel="time of a target call, one node = 1",
            title="Cost of a tree",
        )
        left.legend()
        right.legend()


def print_methods(title: str, rows: list[dict], columns: Mapping[str, str]) -> None:
    """A table of methods; `columns` maps the titles of additional columns to keys of the rows."""
    print_table(
        title,
        ("method", *columns, "tokens/s", "speed-up", "tau", "identical"),
        [
            (
                row["method"],
                *(row[key] for key in columns.values()),
                f"{row['tokens_per_second']['median']:,.0f}",
                f"{row['speed_up']['median']:.2f}x",
                f"{row['tau']:.2f}",
                {True: "yes", False: "no", None: "-"}[row["identical"]],
            )
            for row in rows
        ],
    )


def main() -> None:
    """Runs the benchmark and writes `decode-<device>.json` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", help="any checkpoint; None: the embedded one")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--name", help="of the pair, for the results")
    options = read_options(parser, plots=True)
    given = (options.target, options.draft, options.name)
    if any(given) and not all(given):
        parser.error("--target, --draft and --name come together")

    path = find(options.target or st.demo_path("target"))
    target = st.from_pretrained(path)
    draft = st.from_pretrained(options.draft or st.demo_path("draft"))
    tokenizer = st.load_tokenizer(path)
    source, texts = load_prompts(options.prompts)
    prompts = [tokenizer.encode(text).ids for text in texts]

    where = machine()  # before anything loads it
    tuned = None if options.target else st.demo_path("target").with_name("tree.json")
    rows, steps, ways = [], [], methods(draft, tuned)
    with progress_bar() as progress:
        calls = 2 * decoding_calls(ways, prompts, options.rounds) + 3 * STEP_CALLS
        task = progress.add_task("", total=calls)
        for temperature in (0.0, 1.0):
            rows += measure_decoding(
                target,
                ways,
                prompts,
                tokens=options.tokens,
                temperature=temperature,
                rounds=options.rounds,
                progress=progress,
                task=task,
            )
        larger = st.ModelConfig.preset("mamba2-130m")
        for name, model, count in (
            (f"{options.name or 'embedded'} target", target, 100),
            (f"{options.name or 'embedded'} draft", draft, 100),
            ("mamba2-130m shape", st.HybridLM(larger, rngs=nnx.Rngs(0)), 5),
        ):
            steps.append(measure_steps(name, model, count=count, progress=progress, task=task))

    for temperature in (0.0, 1.0):
        print_methods(
            f"{len(prompts)} prompts ({source}), {options.tokens} tokens, temperature"
            f" {temperature:g}",
            [row for row in rows if row["temperature"] == temperature],
            {"nodes": "nodes"},
        )
    print_table(
        "Milliseconds of a target call by tree nodes (relative to one node)",
        ("model", "1", "2", "5", "13", "29"),
        [
            (
                step["model"],
                *(
                    f"{value['median']:.2f} ({step['relative_to_one_node'][nodes]:.1f})"
                    for nodes, value in step["milliseconds_by_nodes"].items()
                ),
            )
            for step in steps
        ],
    )
    different = [row["method"] for row in rows if row["identical"] is False]
    results = {
        "machine": where,
        "prompts": source,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "decoding": rows,
        "target_calls": steps,
    }
    path = save(
        f"decode-{options.name}" if options.name else "decode", __doc__, results, options.output
    )
    plot(rows, steps, path.with_suffix(".png"))
    best = max(
        (row for row in rows if row["temperature"] == 0 and row["nodes"] > 1),
        key=lambda row: row["speed_up"]["median"],
    )
    conclude(
        "decode",
        passed=not different,
        best=best["method"],
        speed_up=round(best["speed_up"]["median"], 3),
        tau=round(best["tau"], 3),
        different=different,
        results=str(path),
    )


if __name__ == "__main__":
    main()
