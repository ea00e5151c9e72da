"""Methods of decoding, the lists of methods that experiments compare, and the comparison."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import SPEED, Panel, Table, progress_bar, summary, timed
from benchmarks.models import Pair
from stree_jax.decoding.options import Plan, plan
from stree_jax.tuning import (
    acceptance,
    best_trees,
    dynamic_tau,
    fitted,
    measure_costs,
    rank_trace,
    replay_tau,
)

PLAIN = "autoregressive"
CHAIN_OF_4 = st.TreeTopology.chain(4)
PAPER_TREES = {f"tree {name}": st.TreeTopology.paper(name) for name in "ABCDE"}
MAX_NODES = 24  # of a tuned tree, as for the one that ships
MAX_DEPTH = 8
NUM_RANKS = 8
DRAWS = 2000


class Method(NamedTuple):
    """A way of decoding; without a drafter it is autoregressive."""

    name: str
    drafter: st.Drafter | None = None
    topology: st.TreeTopology | None = None
    verifier: str | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes of its tree, root included."""
        return 1 if self.topology is None else self.topology.num_nodes

    @property
    def follows_target(self) -> bool:
        """Whether its tokens are those of autoregressive decoding with the same key."""
        return self.verifier in (None, "greedy", "target_only")

    def decode(
        self,
        pair: Pair,
        prompts: Sequence[list[int]],
        tokens: int,
        temperature: float = 0.0,
        **options: Any,
    ) -> st.Generation:
        """A batch of the pair's target, with its key 0."""
        return st.generate(
            pair.target,
            prompts,
            max_new_tokens=tokens,
            temperature=temperature,
            key=jax.random.key(0),
            **self.options(),
            **options,
        )

    def options(self) -> dict[str, Any]:
        """Its options of `stree_jax.generate`."""
        chosen = {"drafter": self.drafter, "topology": self.topology, "verifier": self.verifier}
        return {name: value for name, value in chosen.items() if value is not None}


def trees(drafter: st.Drafter, topologies: Mapping[str, st.TreeTopology]) -> list[Method]:
    """A method for each topology, all with one drafter."""
    return [Method(name, drafter, topology) for name, topology in topologies.items()]


def own_tree(name: str, drafter: Any) -> Method:
    """A drafter with its default topology."""
    return Method(name, drafter, drafter.default_topology())


def prompt_lookup() -> Method:
    """Drafts that are copied from the text so far."""
    return Method("prompt lookup, chain of 4", st.NgramDrafter(), CHAIN_OF_4)


def shipped(draft: st.HybridLM) -> list[Method]:
    """The tree that `tune-tree` wrote for the embedded pair, and a dynamic tree of its size."""
    found = json.loads(st.demo_path("target").with_name("tree.json").read_text())
    tree = st.TreeTopology.from_parents(found["parents"])
    dynamic = st.DynamicDrafter(draft, sharpness=found["sharpness"])
    budget = st.TreeTopology.budget(tree.num_nodes, tree.depth)
    return [
        Method("tuned tree", st.ModelDrafter(draft), tree),
        Method("dynamic tree", dynamic, budget),
    ]


def compare(
    pair: Pair, methods: Sequence[Method], temperatures: Iterable[float], options: Any
) -> list[dict[str, Any]]:
    """Decodes the prompts one at a time with every method, interleaved prompt by prompt.

    Args:
        pair: target and prompts.
        methods: ways of decoding, `PLAIN` among them.
        temperatures: each is measured by itself.
        options: `tokens`, the limit of each text, and `rounds`, the timed texts of each prompt.

    Returns:
        A record for each temperature and method: speed, tau, and whether its tokens are `PLAIN`'s.
    """
    rows = []
    for temperature in temperatures:

        def decode(method: Method, prompt: list[int], at: float = temperature) -> st.Generation:
            return method.decode(pair, [prompt], options.tokens, at)

        ways = {method.name: functools.partial(decode, method) for method in methods}
        texts, seconds = timed(f"temperature {temperature:g}", ways, pair.prompts, options.rounds)
        emitted = {name: sum(out.stats.num_tokens for out in texts[name]) for name in ways}
        speeds = {name: emitted[name] / seconds[name].sum(axis=1) for name in ways}
        plain = [out.tokens for out in texts[PLAIN]]
        for method in methods:
            name, mine = method.name, texts[method.name]
            calls = sum(out.stats.num_target_calls for out in mine)
            accepted = sum(out.stats.accepted_per_depth for out in mine)
            rows.append(
                {
                    "method": name,
                    "temperature": temperature,
                    "nodes": method.num_nodes,
                    "tokens_per_second": summary(speeds[name]),
                    "tokens_per_second_by_round": speeds[name].tolist(),
                    "seconds_by_prompt": np.median(seconds[name], axis=0).tolist(),
                    "speed_up": summary(speeds[name] / speeds[PLAIN]),
                    "tau": emitted[name] / calls,
                    "accepted_per_depth": [round(float(count) / calls, 4) for count in accepted],
                    "identical": all(map(np.array_equal, plain, [out.tokens for out in mine])),
                }
            )
    return rows


def different(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Methods whose tokens should be those of autoregressive decoding, and are not."""
    return [
        f"{row['method']}, temperature {row['temperature']:g}"
        for row in rows
        if row["identical"] is False
    ]


def method_tables(title: str, rows: Sequence[Mapping[str, Any]], **columns: str) -> list[Table]:
    """A table of methods for each temperature; `columns` are formats of additional ones."""
    return [
        Table(
            f"{title}, temperature {temperature:g}",
            [row for row in rows if row["temperature"] == temperature],
            {"method": "{method}", **columns, "nodes": "{nodes}"}
            | SPEED
            | {"tau": "{tau:.2f}", "identical": "{identical}"},
        )
        for temperature in dict.fromkeys(row["temperature"] for row in rows)
    ]


def speed_panel(rows: Sequence[Mapping[str, Any]]) -> Panel:
    """Speed-ups as bars, by method and temperature."""
    bars = {"T = {temperature:g}": "{speed_up[median]}"}
    return Panel("", "tokens per second, autoregressive = 1", rows, "{method}", bars)


def written_texts(
    target: st.HybridLM, prompts: list[list[int]], tokens: int, temperature: float
) -> tuple[Plan, list[np.ndarray]]:
    """The plan of a request, and the texts that the target writes for it."""
    options: dict[str, Any] = dict(
        max_new_tokens=tokens, temperature=temperature, key=jax.random.key(1)
    )
    texts = st.generate(target, prompts, **options)
    written = [row[:length] for row, length in zip(texts.tokens, texts.lengths, strict=True)]
    return plan(target, prompts, **options), written


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
    request, written = written_texts(pair.target, pair.prompts, tokens, temperature)
    vocab_size = pair.target.config.vocab_size
    trace = rank_trace(drafter, request, written, min(NUM_RANKS, vocab_size), vocab_size)
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
    methods, chosen = [], []
    for size in sizes:
        fast = best_trees(accept, costs, size, MAX_DEPTH)
        static = next(tree for tree in fast if tree.num_nodes == size)
        budget = st.TreeTopology.budget(size, static.depth)
        taus = dynamic_tau(pair.draft, request, written, [budget])[budget]
        sharpness = fitted(taus)
        dynamic = st.DynamicDrafter(pair.draft, sharpness=sharpness)
        beams = level_sizes(size, static.depth)
        methods += [
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
    return methods, chosen


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
