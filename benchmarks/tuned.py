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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import stree_jax as st
from benchmarks import methods
from benchmarks.common import Found, Panel, forget_programs, progress_bar
from benchmarks.methods import PAPER_TREES, PLAIN, Method, trees
from benchmarks.models import Pair, chosen_pair
from stree_jax.tuning import (
    acceptance,
    best_trees,
    dynamic_tau,
    fitted,
    measure_costs,
    rank_trace,
    replay_tau,
)

TUNING_PROMPTS = 16  # `tune` measures acceptance on half of them
# Tokens of a prompt. With 64 to 96 new ones they share compiled programs, and compiling takes most
# of the time.
PROMPT_LENGTHS = range(65, 97)
MANY_PROMPTS = 240  # of which some have such a length
MAX_NODES = 24  # of a tuned tree, as for the one that ships
MAX_DEPTH = 8
DRAWS = 2000
KIND = "{kind}, T = {temperature:g}"


def run(options: argparse.Namespace) -> Iterator[Found]:
    """The tuned tree against fixed ones, and static, dynamic and beam trees of equal size."""
    if options.shipped and options.target:
        raise SystemExit("--shipped is for the embedded pair")
    if min(options.nodes) < 2:
        raise SystemExit("--nodes counts the root: at least 2")
    pair = chosen_pair(options, MANY_PROMPTS)
    prompts = pair.prompts
    if pair.source != "built-in":
        prompts = [prompt for prompt in prompts if len(prompt) in PROMPT_LENGTHS]
    own = pair._replace(prompts=prompts[options.prompts :][:TUNING_PROMPTS])
    pair = pair._replace(prompts=prompts[: options.prompts])
    drafter = st.ModelDrafter(pair.draft)
    chains = {f"chain of {n}": st.TreeTopology.chain(n) for n in range(1, 9)}
    rows, equal, chosen, tuned, advice = [], [], [], [], []
    for temperature in options.temperatures:
        if options.shipped and temperature == 0:
            tree, origin = methods.shipped(pair.draft)[0].topology, "shipped: tree.json"
        else:
            tree, origin = tuned_tree(own, temperature, options.tokens)
        forget_programs()
        ways = [Method(PLAIN), *([] if tree is None else [Method("tuned", drafter, tree)])]
        ways += trees(drafter, chains | PAPER_TREES)
        others, how = of_equal_size(own, options.nodes, temperature, options.tokens)
        forget_programs()
        now = methods.compare(pair, ways, [temperature], options)
        forget_programs()
        for row in methods.compare(pair, [Method(PLAIN), *others], [temperature], options):
            equal.append({"kind": row["method"].split(",")[0]} | row)
        forget_programs()
        rows, chosen = rows + now, chosen + how
        ratios = relative_to(PLAIN if tree is None else "tuned", now)
        slower = [name for name, ratio in ratios.items() if ratio["high"] < 1]
        advice.append(
            f"temperature {temperature:g}: {'do not draft' if tree is None else 'the tuned tree'}"
            f" ({origin}) is {'slower than ' + ', '.join(slower) if slower else 'at least as fast'}"
        )
        tuned.append({"temperature": temperature, "origin": origin, "slower_than": slower})
        tuned[-1] |= {"parents": None if tree is None else tree.parents, "relative_to": ratios}
        yield Found(
            pair.settings()
            | {"tuned": tuned, "decoding": rows}
            | {"trees_of_equal_size": chosen, "decoding_of_equal_size": equal},
            [
                *methods.method_tables("tuned", rows),
                *methods.method_tables("trees of equal size", equal),
            ],
            [
                methods.speed_panel(rows),
                Panel("nodes", "tau", equal, "{nodes}", {KIND: "{tau}"}),
                Panel("nodes", "speed-up", equal, "{nodes}", {KIND: "{speed_up[median]}"}),
            ],
            wrong=methods.different(rows + equal),
            notes=advice,
            line={
                "slower_than": {f"{each['temperature']:g}": each["slower_than"] for each in tuned},
                "draft": {f"{each['temperature']:g}": bool(each["parents"]) for each in tuned},
            },
        )


def tuned_tree(pair: Pair, temperature: float, tokens: int) -> tuple[st.TreeTopology | None, str]:
    """The tree that `tune` finds on the pair's prompts, or None, and its advice."""
    with progress_bar() as progress:
        task = progress.add_task("tuning", total=None)
        report = st.tune(
            pair.target,
            st.ModelDrafter(pair.draft),
            pair.prompts,
            temperature=temperature,
            key=jax.random.key(1),
            max_nodes=MAX_NODES,
            max_depth=MAX_DEPTH,
            max_new_tokens=tokens,
            progress=lambda phase, done, total: progress.update(
                task, description=phase, completed=done, total=total
            ),
        )
    return report.best, f"tuned now: {report.advice}"


def of_equal_size(
    pair: Pair, sizes: Sequence[int], temperature: float, tokens: int
) -> tuple[list[Method], list[dict[str, Any]]]:
    """Static, dynamic and beam trees of each number of nodes, and a record of how they were chosen.

    Static trees are the tuner's fastest of their size, and sharpness is fitted, both on the texts
    that the target writes for the pair's prompts.
    """
    drafter = st.ModelDrafter(pair.draft)
    request, written = methods.written_texts(pair.target, pair.prompts, tokens, temperature)
    vocab_size = pair.target.config.vocab_size
    trace = rank_trace(drafter, request, written, min(methods.NUM_RANKS, vocab_size), vocab_size)
    costs = measure_costs(
        pair.target,
        drafter,
        pair.prompts[0],
        max_nodes=max(sizes),
        max_depth=MAX_DEPTH,
        temperature=temperature,
        key=jax.random.key(1),
    )
    accept = acceptance(trace, MAX_DEPTH)
    others, chosen = [], []
    for size in sizes:
        fast = best_trees(accept, costs, size, MAX_DEPTH)
        static = next(tree for tree in fast if tree.num_nodes == size)
        budget = st.TreeTopology.budget(size, static.depth)
        taus = dynamic_tau(pair.draft, request, written, [budget])[budget]
        sharpness = fitted(taus)
        dynamic = st.DynamicDrafter(pair.draft, sharpness=sharpness)
        beams = level_sizes(size, static.depth)
        others += [
            Method(f"static, {size} nodes", drafter, static),
            Method(f"dynamic, {size} nodes", dynamic, budget),
            Method(f"beam, {size} nodes", st.BeamDrafter(pair.draft), beams),
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
    return others, chosen


def level_sizes(num_nodes: int, depth: int) -> st.TreeTopology:
    """A topology for `BeamDrafter`: the drafts spread evenly over the levels."""
    each, more = divmod(num_nodes - 1, depth)
    parents, above = [-1], 0
    for level in range(depth):
        first = len(parents)
        parents += [above] * (each + (level < more))
        above = first
    return st.TreeTopology.from_parents(parents)


def relative_to(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The speed of a method relative to each other one.

    "all" is over all prompts; "low" and "high" bound it in 90 % of the draws of prompts, with
    replacement.
    """
    seconds = {row["method"]: np.array(row["seconds_by_prompt"]) for row in rows}
    mine = seconds.pop(name)
    drawn = np.random.default_rng(0).integers(len(mine), size=(DRAWS, len(mine)))

    def ratio(other: np.ndarray) -> dict[str, float]:
        ratios = other[drawn].sum(axis=1) / mine[drawn].sum(axis=1)
        low, high = np.quantile(ratios, (0.05, 0.95)).tolist()
        return {"all": float(other.sum() / mine.sum()), "low": low, "high": high}

    return {name: ratio(other) for name, other in seconds.items()}


if __name__ == "__main__":
    from benchmarks.experiments import main

    main("tuned", __doc__)
