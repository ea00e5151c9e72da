"""Is the tuned tree the fastest one, and what do dynamic trees add?

First the tuned tree against no drafts, chains of 1 to 8 and the paper's trees A to E. Then dynamic
trees with a fitted sharpness against the best static tree and a beam tree of as many nodes and
levels. Prompts are decoded one at a time, all methods interleaved; what is tuned is tuned on other
prompts. All methods must give the same tokens with the same key.

Which tree is best depends on the text as well as on the machine, so the spread is over prompts,
drawn anew 2,000 times with replacement. A method is faster than the tuned tree if it is so in 95 %
of the draws.

    python -m benchmarks.tuned [--prompts 12] [--tokens 96] [--rounds 3] [--nodes 6 13 32]
        [--shipped]                                 the tree that ships with the embedded pair
        [--output DIR | --commit]                   default: benchmark-results; benchmarks/results
        [--target DIR --draft DIR --name NAME]      instead of the embedded pair
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.progress import Progress

import stree_jax as st
from benchmarks.common import (
    conclude,
    forget_programs,
    machine,
    plotted,
    print_table,
    progress_bar,
    read_options,
    save,
)
from benchmarks.decode import Method, decoding_calls, measure_decoding, print_methods
from benchmarks.prompts import load_prompts
from stree_jax.cli.trees import parse_tree
from stree_jax.convert import find
from stree_jax.decoding.options import plan
from stree_jax.tuning import (
    Costs,
    acceptance,
    best_trees,
    dynamic_tau,
    fitted,
    measure_costs,
    rank_trace,
    replay_tau,
)

PLAIN = "autoregressive"
TUNED = "tuned"
TEMPERATURES = (0.0, 1.0)
TUNING_PROMPTS = 16  # `tune` measures acceptance on half of them
# Tokens of a prompt. With 64 to 96 new ones they share compiled programs, and compiling takes most
# of the time.
PROMPT_LENGTHS = range(65, 97)
MANY_PROMPTS = 240  # of which some have such a length
DRAWS = 2000
MAX_NODES = 24  # of the tuned tree, as for the one that ships
MAX_DEPTH = 8
NUM_RANKS = 8


class Models(NamedTuple):
    """A pair, and prompts to tune on."""

    target: st.HybridLM
    draft: st.HybridLM
    prompts: list[list[int]]

    def tuned(
        self, temperature: float, shipped: Path | None, tokens: int, progress: Progress
    ) -> tuple[st.TreeTopology | None, str]:
        """The tuned tree, or None, and where it comes from."""
        if shipped is not None and shipped.exists():
            return parse_tree(f"@{shipped}"), f"shipped: {shipped.name}"
        task = progress.add_task("tuning", total=None)
        report = st.tune(
            self.target,
            st.ModelDrafter(self.draft),
            self.prompts,
            temperature=temperature,
            key=jax.random.key(1),
            max_nodes=MAX_NODES,
            max_depth=MAX_DEPTH,
            max_new_tokens=tokens,
            progress=lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
        progress.remove_task(task)
        return report.best, f"tuned now: {report.advice}"

    def of_equal_size(
        self, sizes: Sequence[int], temperature: float, tokens: int, progress: Progress
    ) -> tuple[list[Method], list[dict[str, Any]]]:
        """Static, dynamic and beam trees of each number of nodes, and how they were chosen."""
        task = progress.add_task(f"trees of equal size, temperature {temperature:g}", total=None)
        options: dict[str, Any] = dict(
            max_new_tokens=tokens, temperature=temperature, key=jax.random.key(1)
        )
        drafter = st.ModelDrafter(self.draft)
        request = plan(self.target, self.prompts, **options)
        texts = st.generate(self.target, self.prompts, **options)
        written = [row[:length] for row, length in zip(texts.tokens, texts.lengths, strict=True)]
        vocab_size = self.target.config.vocab_size
        trace = rank_trace(drafter, request, written, min(NUM_RANKS, vocab_size), vocab_size)
        costs = measure_costs(
            self.target,
            drafter,
            self.prompts[0],
            max_nodes=max(sizes),
            max_depth=MAX_DEPTH,
            temperature=temperature,
            key=jax.random.key(1),
        )
        ways, chosen = [], []
        accept = acceptance(trace, MAX_DEPTH)
        for size in sizes:
            static = best_static(accept, costs, size)
            budget = st.TreeTopology.budget(size, static.depth)
            taus = dynamic_tau(self.draft, request, written, [budget])[budget]
            sharpness = fitted(taus)
            dynamic = st.DynamicDrafter(self.draft, sharpness=sharpness)
            ways += [
                Method(f"static, {size} nodes", drafter, static),
                Method(f"dynamic, {size} nodes", dynamic, budget),
                Method(
                    f"beam, {size} nodes",
                    st.BeamDrafter(self.draft),
                    level_sizes(size, static.depth),
                ),
            ]
            chosen.append(
                {
                    "nodes": size,
                    "temperature": temperature,
                    "depth": static.depth,
                    "parents": static.parents,
                    "sharpness": sharpness,
                    "tau_of_static_when_tuned": replay_tau(static, trace),
                    "tau_of_dynamic_when_tuned": {str(sharp): tau for sharp, tau in taus.items()},
                }
            )
        progress.remove_task(task)
        return ways, chosen


def best_static(accept: np.ndarray, costs: Costs, num_nodes: int) -> st.TreeTopology:
    """The tuner's fastest tree of so many nodes."""
    trees = best_trees(accept, costs, num_nodes, len(accept))
    return next(tree for tree in trees if tree.num_nodes == num_nodes)


def level_sizes(num_nodes: int, depth: int) -> st.TreeTopology:
    """A topology for `BeamDrafter`: the drafts spread evenly over the levels."""
    each, more = divmod(num_nodes - 1, depth)
    parents, above = [-1], 0
    for level in range(depth):
        first = len(parents)
        parents += [above] * (each + (level < more))
        above = first
    return st.TreeTopology.from_parents(parents)


def against_the_tuned_tree(draft: st.HybridLM, tuned: st.TreeTopology | None) -> list[Method]:
    """No drafts, the tuned tree if there is one, chains, and the paper's trees."""
    drafter = st.ModelDrafter(draft)
    return [
        Method(PLAIN, None, None),
        *([] if tuned is None else [Method(TUNED, drafter, tuned)]),
        *(Method(f"chain of {n}", drafter, st.TreeTopology.chain(n)) for n in range(1, 9)),
        *(Method(f"tree {name}", drafter, st.TreeTopology.paper(name)) for name in "ABCDE"),
    ]


def verdict(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The tuned tree's speed relative to each other method. Without one: no drafts'.

    Over the prompts and, as "low" and "high", in 90 % of all draws of prompts.
    """
    seconds = {row["method"]: np.array(row["seconds_by_prompt"]) for row in rows}
    mine = TUNED if TUNED in seconds else PLAIN
    count = len(seconds[mine])
    drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))

    def ratio(other: np.ndarray) -> dict[str, float]:
        ratios = other[drawn].sum(axis=1) / seconds[mine][drawn].sum(axis=1)
        low, high = np.quantile(ratios, (0.05, 0.95)).tolist()
        return {"all": float(other.sum() / seconds[mine].sum()), "low": low, "high": high}

    return {name: ratio(other) for name, other in seconds.items() if name != mine}


def plot(
    rows: list[dict[str, Any]], equal: list[dict[str, Any]], sizes: Sequence[int], path: Path
) -> None:
    """Speed-ups by method; tau of trees of equal size."""
    with plotted(path, 3, 17, 4.5) as (left, middle, right):
        names = list(dict.fromkeys(row["method"] for row in rows))
        for offset, temperature in ((-0.2, 0.0), (0.2, 1.0)):
            part = {row["method"]: row for row in rows if row["temperature"] == temperature}
            left.bar(
                [names.index(name) + offset for name in part],
                [row["speed_up"]["median"] for row in part.values()],
                width=0.38,
                label=f"temperature {temperature:g}",
            )
        left.axhline(1, color="black", linewidth=0.8)
        left.set_xticks(range(len(names)), names, rotation=60, ha="right")
        left.set(ylabel="tokens per second, autoregressive = 1")
        left.legend()
        for kind in ("static", "dynamic", "beam"):
            for temperature, style in ((0.0, "-"), (1.0, "--")):
                part = [
                    row
                    for row in equal
                    if row["method"].startswith(kind) and row["temperature"] == temperature
                ]
                label = f"{kind}, temperature {temperature:g}"
                for axis, values in (
                    (middle, [row["tau"] for row in part]),
                    (right, [row["speed_up"]["median"] for row in part]),
                ):
                    axis.plot(sizes, values, style, marker="o", label=label)
        middle.set(xlabel="nodes", ylabel="tau")
        right.set(xlabel="nodes", ylabel="tokens per second, autoregressive = 1")
        right.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes `tuned-<device>.json` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="+", default=(6, 13, 32))
    parser.add_argument("--shipped", action="store_true", help="at temperature 0, do not tune")
    parser.add_argument("--target", help="any checkpoint; None: the embedded one")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--name", help="of the pair, for the results")
    options = read_options(parser, arguments, plots=True)
    given = (options.target, options.draft, options.name)
    if any(given) and not all(given):
        parser.error("--target, --draft and --name come together")
    if options.shipped and options.target:
        parser.error("--shipped is for the embedded pair")
    if min(options.nodes) < 2:
        parser.error("--nodes counts the root: at least 2")

    folder = find(options.target or st.demo_path("target"))
    tokenizer = st.load_tokenizer(folder)
    source, texts = load_prompts(MANY_PROMPTS)
    prompts = [tokenizer.encode(text).ids for text in texts]
    if source != "built-in":
        prompts = [prompt for prompt in prompts if len(prompt) in PROMPT_LENGTHS]
    prompts = prompts[: options.prompts + TUNING_PROMPTS]
    prompts, own = prompts[: options.prompts], prompts[options.prompts :]
    target = st.from_pretrained(folder)
    draft = st.from_pretrained(options.draft or st.demo_path("draft"))
    models = Models(target, draft, own)

    rows, equal, chosen, tuned = [], [], [], []
    results = {
        "machine": machine(),  # before anything loads it
        "prompts": source,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "tuned": tuned,
        "decoding": rows,
        "trees_of_equal_size": chosen,
        "decoding_of_equal_size": equal,
    }
    file_name = f"tuned-{options.name}" if options.name else "tuned"
    for temperature in TEMPERATURES:
        shipped = None
        if temperature == 0 and options.shipped:
            shipped = st.demo_path("target").with_name("tree.json")
        with progress_bar() as progress:
            topology, origin = models.tuned(temperature, shipped, options.tokens, progress)
            forget_programs()
            ways = against_the_tuned_tree(draft, topology)
            others, how = models.of_equal_size(options.nodes, temperature, options.tokens, progress)
            forget_programs()
            others = [Method(PLAIN, None, None), *others]
            chosen += how
            task = progress.add_task(
                "", total=decoding_calls([*ways, *others], prompts, options.rounds)
            )
            for group, into in ((ways, rows), (others, equal)):
                into += measure_decoding(
                    target,
                    group,
                    prompts,
                    tokens=options.tokens,
                    temperature=temperature,
                    rounds=options.rounds,
                    progress=progress,
                    task=task,
                )
                forget_programs()
        ratios = verdict([row for row in rows if row["temperature"] == temperature])
        tuned.append(
            {
                "temperature": temperature,
                "parents": None if topology is None else topology.parents,
                "origin": origin,
                "relative_to": ratios,
                "slower_than": [name for name, ratio in ratios.items() if ratio["high"] < 1],
            }
        )
        path = save(file_name, __doc__, results, options.output)  # what there is so far

    for temperature, result in zip(TEMPERATURES, tuned, strict=True):
        for title, part in (("tuned", rows), ("trees of equal size", equal)):
            print_methods(
                f"{title}, {len(prompts)} prompts ({source}), {options.tokens} tokens, temperature"
                f" {temperature:g}",
                [row for row in part if row["temperature"] == temperature],
                {"nodes": "nodes"},
            )
        print_table(
            "chosen on other prompts: tau there",
            ("nodes", "depth", "static", "dynamic", "sharpness"),
            [
                (
                    row["nodes"],
                    row["depth"],
                    row["tau_of_static_when_tuned"],
                    row["tau_of_dynamic_when_tuned"][str(row["sharpness"])],
                    row["sharpness"],
                )
                for row in chosen
                if row["temperature"] == temperature
            ],
        )
        tree = "do not draft" if result["parents"] is None else "the tuned tree"
        slower = ", ".join(result["slower_than"])
        print(
            f"temperature {temperature:g}: {tree} ({result['origin']})"
            + (f" is slower than {slower}" if slower else " is at least as fast as all others")
        )
    different = [
        f"{row['method']}, temperature {row['temperature']:g}"
        for row in rows + equal
        if not row["identical"]
    ]
    plot(rows, equal, options.nodes, path.with_suffix(".png"))
    conclude(
        "tuned",
        passed=not different,
        slower_than={f"{result['temperature']:g}": result["slower_than"] for result in tuned},
        draft={f"{result['temperature']:g}": result["parents"] is not None for result in tuned},
        different=different,
        results=str(path),
    )


if __name__ == "__main__":
    main()
