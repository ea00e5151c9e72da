"""Is `topology="auto"` never slower than no drafts, and as fast as the best fixed tree?

The embedded pair, in turns: no drafts, and for each of four drafters two fixed trees and "auto", at
temperatures 0 and 1, in float32 and in 8 bits, with `--rows` at a time: 16 cases for one number of
rows. Texts run first until no program is compiled beside any more. With `--fresh N` also: the first
text of N processes that have no programs, over that of a fixed tree; and the longest time without a
token of a second text whose drafts fail, after a first one whose drafts were right.

    python -m benchmarks.auto --rows 1 --fresh 3        [--weights float32 int8] [--prompts 3]
    python -m benchmarks.auto --rows 8 --tokens 96
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.common import Found, forget_programs, main
from benchmarks.methods import TWO_DEFAULTS, compare, trees
from benchmarks.models import Pair, embedded_pair
from stree_jax.decoding import quanta
from stree_jax.measuring.methods import PLAIN, Method, different
from stree_jax.measuring.report import Table

AUTO = {"auto": "auto"}
WEIGHTS = ("float32", "int8")
AIMS = {"over_none": 0.97, "over_best": 0.97, "first_text": 1.3, "stall_ms": 50.0}
OPTIONS = {"--prompts": 3, "--tokens": 128, "--rounds": 3, "--temperatures": (0.0, 1.0)}
OPTIONS |= {"--rows": (1,), "--fresh": 0, "--heads": None}
OPTIONS |= {"--weights": {"nargs": "+", "choices": WEIGHTS, "default": [*WEIGHTS]}}
COLUMNS = {name: f"{{{name}}}" for name in ("drafter", "weights", "temperature", "rows")}
COLUMNS |= {name: f"{{{name}:.2f}}" for name in ("best_fixed", "over_none", "over_best")}
COLUMNS |= {"calls": "{calls}"}
# Run by a process of its own: the seconds of its first text, with this topology.
FIRST_TEXT = """
import sys, time
import stree_jax as st
from benchmarks.models import embedded_pair
pair = embedded_pair(1)
topology = sys.argv[1] if sys.argv[1] == "auto" else None
began = time.perf_counter()
drafter = st.ModelDrafter(pair.draft)
st.generate(pair.target, pair.prompts, drafter=drafter, topology=topology, max_new_tokens=128)
print(time.perf_counter() - began)
"""


def drafters(pair: Pair, heads: str | None) -> dict[str, st.Drafter]:
    """Good and bad ones."""
    random = st.HybridLM(pair.draft.config, rngs=nnx.Rngs(0)).packed()
    medusa = st.load_medusa(heads or st.demo_path("medusa"), pair.target)
    return {
        "draft model": st.ModelDrafter(pair.draft),
        "random draft": st.ModelDrafter(random),
        "prompt lookup": st.NgramDrafter(),
        "Medusa": st.MedusaDrafter(pair.target, medusa),
    }


def warm(pair: Pair, method: Method, rows: int, how: Any) -> None:
    """Decodes until a text has compiled nothing beside."""
    for _ in range(6):
        st.generate(pair.target, pair.prompts[:rows], **how, **method.way)
        if not quanta._COMPILING.locked():
            return
        with quanta._COMPILING:  # it has been compiled
            pass


def cases(pair: Pair, weights: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each drafter, temperature and number of rows; and what gave other texts."""
    named = drafters(pair, options.heads)
    for temperature in options.temperatures:
        for rows in options.rows:
            ways = [Method(PLAIN)]
            for name, drafter in named.items():
                ways += trees(drafter, TWO_DEFAULTS | AUTO, f"{name}, ")
            how = dict(max_new_tokens=options.tokens, temperature=temperature, key=0)
            for way in ways:
                if way.topology == "auto":
                    warm(pair, way, rows, how | {"eos_token": () if rows > 1 else None})
            records = compare(pair, ways, temperature, options, rows, parts=False)
            speeds = {record.method: record.speed_up["median"] for record in records}
            taken = {record.method: record.calls_by_tree for record in records}
            for name in named:
                best = max(speeds[f"{name}, {tree}"] for tree in TWO_DEFAULTS)
                speed = speeds[f"{name}, auto"]
                yield {
                    "drafter": name,
                    "weights": weights,
                    "temperature": temperature,
                    "rows": rows,
                    "best_fixed": best,
                    "over_none": speed,
                    "over_best": speed / max(best, 1.0),
                    "calls": taken[f"{name}, auto"],
                    "different": different(records),
                }
            forget_programs()
            quanta._known.cache_clear()


def first_texts(count: int) -> dict[str, Any]:
    """The first text of a process with "auto", relative to the default tree; medians."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    seconds: dict[str, list[float]] = {"auto": [], "fixed": []}
    for _ in range(count):
        for way, taken in seconds.items():
            command = [sys.executable, "-c", FIRST_TEXT, way]
            printed = subprocess.check_output(command, text=True, env=environment)
            taken.append(float(printed.split()[-1]))
    auto, fixed = (float(np.median(taken)) for taken in seconds.values())
    return {"first_text": auto / fixed, "seconds": seconds}


def stall(pair: Pair) -> dict[str, Any]:
    """The longest time between two pieces of a second text whose drafts are never right."""
    draws, drafter = np.random.default_rng(0), st.ModelDrafter(pair.draft)
    good, bad = pair.prompts[0], draws.integers(0, pair.target.config.vocab_size, 64).tolist()
    how = dict(drafter=drafter, topology="auto", max_new_tokens=1500, eos_token=(), key=0)
    gaps: list[float] = []
    for prompt, temperature in ((good, 1.0), (bad, 1.6)):
        gaps, last = [], time.perf_counter()
        for _ in st.stream(pair.target, [prompt], temperature=temperature, **how):
            now = time.perf_counter()
            gaps.append(1e3 * (now - last))
            last = now
        del gaps[0]  # the prompt
    gaps.sort()
    return {"stall_ms": gaps[-1], "median_ms": gaps[len(gaps) // 2], "longest_ms": gaps[-8:]}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All cases, one kind of weights after the other."""
    records: list[dict[str, Any]] = []
    numbers: dict[str, Any] = {}
    needed = max(options.prompts, *(8 * (rows > 1) for rows in options.rows))
    for weights in options.weights:
        how = None if weights == "float32" else weights
        pair = embedded_pair(needed, quantize=how, draft_quantize=how)
        if options.fresh and not numbers:
            numbers = first_texts(options.fresh) | stall(pair)
        for record in cases(pair, weights, options):
            records.append(record)
            met = {
                name: f"{sum(row[name] >= AIMS[name] for row in records)} of {len(records)}"
                for name in ("over_none", "over_best")
            }
            met |= {name: numbers[name] for name in ("first_text", "stall_ms") if numbers}
            yield Found(
                {"decoding": records, "aims": AIMS, "met": met} | numbers,
                [Table(f"{AIMS}: {met}", records, COLUMNS)],
                wrong=[name for row in records for name in row["different"]],
                line=met,
            )


if __name__ == "__main__":
    main(run, OPTIONS)
