"""Drafting with two models: its theory and its speed. The experiment `benchmarks.hierarchical`.

A target p, a medium model q and a small one s; n drafts of s and one of q, m times.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import stree_jax as st
from benchmarks.common import Found, Table
from benchmarks.methods import (
    CHAIN_OF_4,
    PLAIN,
    Method,
    compare,
    different,
    fastest,
    method_tables,
    own_tree,
    speed_panel,
)
from benchmarks.models import Pair, embedded_pair
from benchmarks.steps import time_of_calls

MAX_PATTERN = 16  # letters of an `InterleavedDrafter`


def expected_tokens(a: float, b: float, m: int, n: int) -> float:
    """Theorem 3.2: tokens of a target call if drafts of q and s are kept with odds a and b."""
    whole = a * b**n
    inner = (1 - b ** (n + 1)) / (1 - b) if b < 1 else n + 1.0
    outer = (1 - whole**m) / (1 - whole) if whole < 1 else float(m)
    return inner * outer + whole**m


def expected_of_order(odds: Sequence[float]) -> float:
    """Tokens of a target call whose drafts are kept with these odds if all before them are."""
    return 1 + float(np.cumprod(odds).sum())


def improvement(tokens: float, m: int, n: int, c: float, c_small: float) -> float:
    """Equation 3: speed against no drafts; c and c_small are costs of q by p and of s by q."""
    return tokens / (1 + m * c + m * n * c * c_small)


def tested(pair: Pair, drafter: st.Drafter, tokens: int, length: int | None) -> st.DecodeStatistics:
    """Statistics of a chain of drafts that are tested one by one, at temperature 1."""
    chain = None if length is None else st.TreeTopology.chain(length)
    method = Method("", drafter, chain, "multi_step")
    return method.decode(pair, pair.prompts, tokens, 1.0, eos_token=()).stats


def lengths(
    pair: Pair, small: st.HybridLM, most: int, tokens: int, costs: Mapping[str, float]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Acceptance of each model's first draft, and tokens a target call by m and n up to `most`."""
    rates = {}
    for name, target, draft in (
        ("a: q by p", pair.target, pair.draft),
        ("b: s by p", pair.target, small),
        ("s by q", pair.draft, small),
    ):
        one = st.ModelDrafter(draft, child_sampling="iid")
        stats = tested(pair._replace(target=target), one, tokens, 1)
        rates[name] = float(stats.accepted_per_depth[0] / stats.num_target_calls)
    a, b = rates["a: q by p"], rates["b: s by p"]
    rows = []
    for m, n in itertools.product(range(1, most + 1), repeat=2):
        pattern = ("s" * n + "q") * m
        odds = sorted((b if letter == "s" else a for letter in pattern), reverse=True)
        formula = expected_tokens(a, b, m, n)
        rows.append({"m": m, "n": n, "formula": formula, "best order": expected_of_order(odds)})
        rows[-1]["improvement"] = improvement(
            formula, m, n, costs["q"] / costs["p"], costs["s"] / costs["q"]
        )
        rows[-1]["measured"] = None
        if len(pattern) <= MAX_PATTERN:
            turns = st.InterleavedDrafter(pair.draft, small, pattern, child_sampling="iid")
            rows[-1]["measured"] = tested(pair, turns, tokens, None).tau
    return rates, rows


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Costs and acceptance of each model, theorem 3.2, and the speed of each way to draft."""
    pair = embedded_pair(options.prompts)
    q, lookup = pair.draft, st.NgramDrafter()
    small = None if options.small is None else st.from_pretrained(options.small)
    methods = [
        Method(PLAIN),
        Method("q alone, chain of 4", st.ModelDrafter(q), CHAIN_OF_4),
        Method("prompt lookup alone", lookup, CHAIN_OF_4),
        own_tree("cascade of q and prompt lookup", st.CascadeDrafter(q, lookup, rounds=2)),
    ]
    models, rates, by_pattern = {"p": pair.target, "q": q}, {}, []
    if small is not None:
        s, models["s"] = st.ModelDrafter(small), small
        turns = {"ssq ssq (the paper's order)": "ssqssq", "qq ssss (the better first)": "qqssss"}
        methods += [
            Method("s alone, chain of 4", s, CHAIN_OF_4),
            *(own_tree(name, st.InterleavedDrafter(q, small, x)) for name, x in turns.items()),
            own_tree("cascade of q and s", st.CascadeDrafter(q, s, rounds=2)),
        ]
    calls = {name: time_of_calls(name, model, 100) for name, model in models.items()}
    seconds = {
        name: {key: value / 1e3 for key, value in call["milliseconds_by_nodes"][1].items()}
        for name, call in calls.items()
    }
    if small is not None:
        costs = {name: value["median"] for name, value in seconds.items()}
        rates, by_pattern = lengths(pair, small, options.most, options.tokens, costs)
    rows = compare(pair, methods, options.temperatures, options)
    columns = {name: f"{{{name}}}" for name in ("m", "n", "formula", "measured", "best order")}
    yield Found(
        pair.settings()
        | {"small": options.small, "seconds_of_a_call": seconds}
        | {"rates": rates, "lengths": by_pattern, "decoding": rows},
        [Table(f"Tokens a target call; {rates}", by_pattern, columns)] * bool(by_pattern)
        + method_tables(f"{pair.name}, {options.prompts} prompts", rows),
        [speed_panel(rows)],
        wrong=different(rows),
        notes=[f"temperature {t:g}: {fastest(rows, t)} is fastest" for t in options.temperatures],
    )
