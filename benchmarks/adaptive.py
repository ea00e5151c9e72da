"""Does `Scheduler(adaptive=True)` beat the best fixed way of drafting, on requests of mixed kinds?

Requests of GSM8K, code and chat, half of them at temperature 0 and half at 1, in turn or one kind
after another. Adaptive drafting chooses between the fixed ways: no drafts, a chain of 3, and the
tree that ships with the embedded pair. Rounds are interleaved; all ways must give the same texts.

    python -m benchmarks.adaptive [--requests 24] [--rows 1 8] [--rounds 3]
"""

import argparse
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import Table, conclude, machine, read_options, save, summary, timed
from benchmarks.methods import shipped
from benchmarks.models import embedded_pair

PLAIN, ADAPTIVE = "no drafts", "adaptive"
HOT = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)  # temperatures; there are three kinds


def serve(model: st.HybridLM, way: dict[str, Any], item: tuple[int, str, list]) -> list[list[int]]:
    """The texts of an item: number of rows, name of the order, requests."""
    scheduler = st.Scheduler(model, rows=item[0], max_length=192, **way)
    numbers = [scheduler.submit(request) for request in item[2]]
    texts = {done.request_id: done.tokens for done in scheduler.completions()}
    return [texts[number] for number in numbers]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = read_options(parser, arguments)
    where, pair = machine(), embedded_pair(options.requests)
    tree = shipped(pair.draft)[0].options()
    ways = {PLAIN: {}, "chain of 3": tree | {"topology": st.TreeTopology.chain(3)}}
    ways |= {"shipped tree": tree, ADAPTIVE: tree | {"adaptive": True}}
    calls = {name: functools.partial(serve, pair.target, way) for name, way in ways.items()}
    limits = np.random.default_rng(0).integers(16, 129, options.requests).tolist()
    requests = [
        st.Request(prompt, max_new_tokens=n, temperature=hot, key=jax.random.key(n), eos_token=())
        for prompt, n, hot in zip(pair.prompts, limits, itertools.cycle(HOT), strict=False)
    ]
    orders = {"in turn": requests, "by kind": [r for kind in range(3) for r in requests[kind::3]]}
    items = [(rows, *order) for rows, order in itertools.product(options.rows, orders.items())]
    for rows, hot, call in itertools.product(options.rows, {*HOT}, calls.values()):
        call((rows, "", [r for r in requests if r.temperature == hot]))  # compiles each program
    texts, seconds = timed("requests", calls, items, options.rounds)
    records, wrong = [], [name for name in ways if texts[name] != texts[PLAIN]]
    for column, (rows, order, _) in enumerate(items):
        speeds = {name: summary(sum(limits) / seconds[name][:, column]) for name in ways}
        best = max(speeds[name]["median"] for name in ways if name != ADAPTIVE)
        for name, speed in speeds.items():
            record = {"rows": rows, "order": order, "way": name, "tokens_per_second": speed}
            records.append(record | {"of_best_fixed": speed["median"] / best})
    forms = {"rows": "{rows}", "order": "{order}", "way": "{way}", "speed": "{of_best_fixed:.3f}"}
    Table(f"{pair.name}: speed over the best fixed way's", records, forms).show()
    settings = pair.settings() | {"machine": where, "requests": len(requests)}
    settings |= {"rounds": options.rounds, "ways": records}
    path = save("adaptive", __doc__, settings, options.output)
    found = [round(r["of_best_fixed"], 3) for r in records if r["way"] == ADAPTIVE]
    conclude("adaptive", passed=not wrong, of_best_fixed=found, wrong=wrong, results=str(path))


if __name__ == "__main__":
    main()
