"""Is the tuned tree the fastest one?

The tuned tree against no drafts, chains of 1 to 8 and the paper's trees A to E. Prompts are decoded
one at a time, all methods interleaved; the tree is tuned on other prompts. All methods must give
the same tokens with the same key.

Which tree is best depends on the text as well as on the machine, so the spread is over prompts,
resampled 2,000 times with replacement. A method is faster than the tuned tree if it is so in 95 %
of the draws.

    python -m benchmarks.tuned [--prompts 12] [--tokens 96] [--rounds 3]
        [--output DIR | --commit] [--target DIR --draft DIR --name NAME]
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

import stree_jax as st
from benchmarks import methods
from benchmarks.common import Found, forget_programs, main
from benchmarks.methods import COMPARED, PAPER_TREES, trees
from benchmarks.models import CHECKPOINTS, Pair, chosen_pair
from stree_jax.measuring.methods import PLAIN, Method, different
from stree_jax.measuring.report import method_tables

OPTIONS = COMPARED | CHECKPOINTS | {"--prompts": 12}

TUNING_PROMPTS = 16  # `tune` measures acceptance on half of them
# Tokens of a prompt. With 64 to 96 new ones they share compiled programs, and compiling takes most
# of the time.
PROMPT_LENGTHS = range(65, 97)
MANY_PROMPTS = 240  # of which some have such a length
MAX_NODES = 24  # of a tuned tree, as for the one that ships
MAX_DEPTH = 8
DRAWS = 2000


def run(options: argparse.Namespace) -> Iterator[Found]:
    """The tuned tree against fixed ones, at each temperature."""
    pair = chosen_pair(options, MANY_PROMPTS)
    prompts = pair.prompts
    if pair.source != "built-in":
        prompts = [prompt for prompt in prompts if len(prompt) in PROMPT_LENGTHS]
    own = pair._replace(prompts=prompts[options.prompts :][:TUNING_PROMPTS])
    pair = pair._replace(prompts=prompts[: options.prompts])
    drafter = st.ModelDrafter(pair.draft)
    chains = {f"chain of {n}": st.TreeTopology.chain(n) for n in range(1, 9)}
    rows, tuned = [], []
    for temperature in options.temperatures:
        tree, origin = tuned_tree(own, temperature, options.tokens)
        forget_programs()
        ways = [Method(PLAIN), *([] if tree is None else [Method("tuned", drafter, tree)])]
        ways += trees(drafter, chains | PAPER_TREES)
        now = methods.compare(pair, ways, temperature, options)
        forget_programs()
        rows += now
        ratios = relative_to(PLAIN if tree is None else "tuned", now)
        slower = [name for name, ratio in ratios.items() if ratio["high"] < 1]
        tuned.append({"temperature": temperature, "origin": origin, "slower_than": slower})
        tuned[-1] |= {"parents": None if tree is None else tree.parents, "relative_to": ratios}
        yield Found(
            pair.settings() | {"tuned": tuned, "decoding": rows},
            method_tables("tuned", rows),
            wrong=different(rows),
            line={
                "slower_than": {f"{each['temperature']:g}": each["slower_than"] for each in tuned},
                "draft": {f"{each['temperature']:g}": bool(each["parents"]) for each in tuned},
            },
        )


def tuned_tree(pair: Pair, temperature: float, tokens: int) -> tuple[st.TreeTopology | None, str]:
    """The tree that `tune` finds on the pair's prompts, or None, and its advice."""
    with Console().status("tuning") as status:
        report = st.tune(
            pair.target,
            st.ModelDrafter(pair.draft),
            pair.prompts,
            temperature=temperature,
            key=jax.random.key(1),
            max_nodes=MAX_NODES,
            max_depth=MAX_DEPTH,
            max_new_tokens=tokens,
            progress=lambda *phase_done_total: status.update("{}: {}/{}".format(*phase_done_total)),
        )
    return report.best, report.advice


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
    main(run, OPTIONS)
