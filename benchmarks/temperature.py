"""How does acceptance fall with temperature, and which sampling keeps it up (STree, figure 4)?

The embedded pair at temperatures from 0 to 1.3, on a chain of 4 and on tree A: children by noise
that the target shares; drafts tested by traversal verification, with i.i.d. children and multi-step
sampling (the paper's), and without replacement; the top children and target-only verification (the
paper's naive sampling); a beam tree with as many nodes. Ways that follow the target must give the
tokens of autoregressive decoding at every temperature, the others at 0. Speeds include prefill.

    python -m benchmarks.temperature [--prompts 8] [--tokens 96] [--keys 5] [--rounds 1]
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.methods import TWO_TREES, compare
from benchmarks.models import embedded_pair
from stree_jax.measuring.methods import PLAIN, Method, different
from stree_jax.measuring.report import Table

OPTIONS = {"--prompts": 8, "--tokens": 96, "--keys": 5, "--rounds": 1}

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.3)
# Tree, how children are sampled, and how they are verified above temperature 0.
WAYS = {
    "shared noise, chain of 4": ("chain of 4", "shared", "target_only"),
    "traversal, chain of 4": ("chain of 4", "iid", "traversal"),
    "vanilla, chain of 4": ("chain of 4", "iid", "multi_step"),
    "shared noise, tree A": ("tree A", "shared", "target_only"),
    "traversal, tree A": ("tree A", "without_replacement", "traversal"),
    "naive, tree A": ("tree A", "top_k", "target_only"),
    "multi-step, tree A": ("tree A", "iid", "multi_step"),
    "without replacement, tree A": ("tree A", "without_replacement", "without_replacement"),
}


def methods_at(temperature: float, draft: st.HybridLM) -> list[Method]:
    """All ways; at temperature 0 with the top children and greedy verification."""
    found, greedy = [Method(PLAIN)], temperature == 0
    for name, (tree, sampling, verifier) in WAYS.items():
        drafter = st.ModelDrafter(draft, child_sampling="top_k" if greedy else sampling)
        found.append(Method(name, drafter, TWO_TREES[tree], "greedy" if greedy else verifier))
    beams, verifier = st.TreeTopology.beam(3, 4), "greedy" if greedy else "target_only"
    return [*found, Method("naive, 3 beams of 4", st.BeamDrafter(draft), beams, verifier)]


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All ways at temperatures from 0 to 1.3."""
    pair, rows = embedded_pair(options.prompts), []
    # Rows run to their limit, past any end of text, so that batches stay full.
    batch: dict[str, Any] = {"prompts": pair.prompts, "eos_token": ()}
    requests = [batch | {"key": jax.random.key(1 + i)} for i in range(options.keys)]
    for temperature in TEMPERATURES:
        ways = methods_at(temperature, pair.draft)
        rows += compare(pair, ways, temperature, options, requests)
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        number = TEMPERATURES.index(row["temperature"])
        by_name.setdefault(row["method"], {"method": row["method"]})[f"at {number}"] = row
    forms = {"tau": "[tau]:.2f}", "speed-up": "[speed_up][median]:.2f}x"}
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
        wrong=different(rows),
        line={"tau_at_1": at_1},
    )


if __name__ == "__main__":
    main(run, OPTIONS)
