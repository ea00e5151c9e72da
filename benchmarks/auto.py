"""Is `topology="auto"` never slower than no drafts, and as fast as the best fixed tree?

The embedded pair: no drafts, and for four drafters two fixed trees and "auto", at temperatures 0
and 1, in float32 and 8 bits: 16 cases. With `--fresh N` also: the first text of N processes, over
that with a fixed tree; and the longest wait for a token of a second text whose drafts fail.

    python -m benchmarks.auto --rows 1 --fresh 3
    python -m benchmarks.auto --rows 8 --tokens 96
"""

import argparse
import itertools
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
from benchmarks.methods import TWO_DEFAULTS, trees
from benchmarks.models import Pair, embedded_pair
from stree_jax.decoding import quanta
from stree_jax.measuring.methods import PLAIN, Batch, Method, compare, different
from stree_jax.measuring.report import Table

AIMS = {"over_none": 0.97, "over_best": 0.97, "first_text": 1.3, "stall_ms": 50.0}
OPTIONS = {"--prompts": 3, "--tokens": 128, "--rounds": 3, "--rows": 1, "--fresh": 0}
COLUMNS = {name: f"{{{name}}}" for name in ("drafter", "weights", "temperature", "calls")}
COLUMNS |= {name: f"{{{name}:.2f}}" for name in ("best_fixed", "over_none", "over_best")}
FIRST_TEXT = """
import time, stree_jax as st
from benchmarks.models import embedded_pair
pair = embedded_pair(1)
began = time.perf_counter()
way = dict(drafter=st.ModelDrafter(pair.draft), topology={!r}, max_new_tokens=128)
st.generate(pair.target, pair.prompts, **way)
print(time.perf_counter() - began)
"""


def methods(pair: Pair) -> Iterator[Method]:
    """No drafts; and good and bad drafts with each tree."""
    random = st.HybridLM(pair.draft.config, rngs=nnx.Rngs(0)).packed()
    heads = st.load_medusa(st.demo_path("medusa"), pair.target)
    yield Method(PLAIN)
    for name, drafter in {
        "draft model": st.ModelDrafter(pair.draft),
        "random draft": st.ModelDrafter(random),
        "prompt lookup": st.NgramDrafter(),
        "Medusa": st.MedusaDrafter(pair.target, heads),
    }.items():
        yield from trees(drafter, TWO_DEFAULTS | {"auto": "auto"}, f"{name}, ")


def compared(pair: Pair, temperature: float, options: Any) -> Iterator[dict[str, Any]]:
    """A record for each drafter."""
    rows, ways = options.rows, [*methods(pair)]
    ends = () if rows > 1 else None  # so that a batch stays full
    how = st.Options(max_new_tokens=options.tokens, temperature=temperature, eos_token=ends, key=0)
    starts = range(0, len(pair.prompts) - rows + 1, rows)
    batches = [Batch(pair.prompts[start : start + rows], how) for start in starts]
    for way, _ in itertools.product(ways, range(4)):
        if way.topology == "auto":
            way.decode(pair.target, batches[0])
            with quanta._COMPILING:  # what the text began to compile is there
                pass
    *_, records = compare(pair.target, ways, batches, options.rounds, parts=False)
    by_way = {record.method: record for record in records}
    speeds = {name: record.speed_up["median"] for name, record in by_way.items()}
    for name in [way.name.removesuffix(", auto") for way in ways if way.topology == "auto"]:
        best, speed = (
            max(speeds[f"{name}, {tree}"] for tree in TWO_DEFAULTS),
            speeds[f"{name}, auto"],
        )
        yield {
            "drafter": name,
            "temperature": temperature,
            "best_fixed": best,
            "over_none": speed,
            "over_best": speed / best,
            "calls": by_way[f"{name}, auto"].calls_by_tree,
            "different": different(records),
        }


def first_texts(count: int) -> float:
    """The first text of a process with "auto", relative to the default tree: medians."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    seconds: list[float] = []
    for topology in ["auto", None] * count:
        command = [sys.executable, "-c", FIRST_TEXT.format(topology)]
        seconds.append(float(subprocess.check_output(command, text=True, env=environment)))
    return float(np.median(seconds[::2]) / np.median(seconds[1::2]))


def longest_wait(pair: Pair) -> float:
    """Milliseconds between two tokens of a second text, whose drafts are not those of the first."""
    random = np.random.default_rng(0).integers(0, pair.target.config.vocab_size, 64).tolist()
    way = dict(drafter=st.ModelDrafter(pair.draft), topology="auto", max_new_tokens=1500, key=0)
    times: list[float] = []
    for prompt, temperature in ((pair.prompts[0], 1.0), (random, 1.6)):
        text = st.stream(pair.target, [prompt], temperature=temperature, eos_token=(), **way)
        times = [time.perf_counter() for _ in text]
    return 1e3 * float(np.diff(times).max())


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All cases, one kind of weights after the other."""
    records: list[dict[str, Any]] = []
    met: dict[str, Any] = {}
    number = options.prompts if options.rows == 1 else 2 * options.rows
    for quantize, temperature in itertools.product((None, "int8"), (0.0, 1.0)):
        pair = embedded_pair(number, quantize=quantize, draft_quantize=quantize)
        if options.fresh and not records:
            met = {"first_text": first_texts(options.fresh), "stall_ms": longest_wait(pair)}
        for record in compared(pair, temperature, options):
            records.append({"weights": quantize or "float32"} | record)
        for aim in ("over_none", "over_best"):
            met[aim] = f"{sum(row[aim] >= AIMS[aim] for row in records)} of {len(records)}"
        forget_programs()
        quanta._known.cache_clear()
        yield Found(
            {"decoding": records, "aims": AIMS, "met": met},
            [Table(f"aims {AIMS}: {met}", records, COLUMNS)],
            wrong=[name for row in records for name in row["different"]],
            line=met,
        )


if __name__ == "__main__":
    main(run, OPTIONS)
