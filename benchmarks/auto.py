"""Is `topology="auto"` never slower than no drafts, and as fast as the best fixed tree?

The embedded pair: no drafts, and for four drafters two fixed trees and "auto", at temperatures 0
and 1, in float32 and 8 bits: 16 cases. With `--fresh N` also: the first text of N processes, over
that with a fixed tree; and the longest wait for a token of a second text whose drafts fail.

    python -m benchmarks.auto --rows 1 --fresh 3
    python -m benchmarks.auto --rows 8 --tokens 96
"""

import argparse
import itertools
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
from stree_jax.measuring.methods import PLAIN, Batch, Method, different
from stree_jax.measuring.report import Table

AIMS = "over_none", "over_best"  # at least 0.97
OPTIONS = {"--tokens": 128, "--rounds": 3, "--rows": 1, "--fresh": 0, "--prompts": 3}
COLUMNS = "weights", "temperature", "drafter", "fixed", *AIMS
FIRST_TEXT = """
import time, stree_jax as st
from benchmarks.models import embedded_pair
pair = embedded_pair(1)
began = time.perf_counter()
way = dict(drafter=st.ModelDrafter(pair.draft), topology={!r}, max_new_tokens=128)
st.generate(pair.target, pair.prompts, **way)
print(time.perf_counter() - began)
"""


def compared(pair: Pair, case: tuple[str, float], options: Any) -> Iterator[dict[str, Any]]:
    """A record for each drafter."""
    random = st.HybridLM(pair.draft.config, rngs=nnx.Rngs(0)).packed()
    drafters = {
        "draft model": st.ModelDrafter(pair.draft),
        "random draft": st.ModelDrafter(random),
        "prompt lookup": st.NgramDrafter(),
        "Medusa": st.MedusaDrafter(
            pair.target, st.load_medusa(st.demo_path("medusa"), pair.target)
        ),
    }
    ways, temperature = [Method(PLAIN)], case[-1]
    for name, drafter in drafters.items():
        ways += trees(drafter, TWO_DEFAULTS | {"auto": "auto"}, f"{name}, ")
        how = st.Options(max_new_tokens=options.tokens, temperature=temperature, key=0)
        for _ in range(4):
            ways[-1].decode(pair.target, Batch(pair.prompts[: options.rows], how))
            with quanta._COMPILING:  # what the text began to compile is there
                pass
    records = compare(pair, ways, temperature, options, options.rows)
    assert not different(records)
    speeds = {record.method: record.speed_up["median"] for record in records}
    for name in drafters:
        fixed, speed = [speeds[f"{name}, {tree}"] for tree in TWO_DEFAULTS], speeds[f"{name}, auto"]
        yield dict(zip(COLUMNS, (*case, name, fixed, speed, speed / max(fixed)), strict=True))


def first_texts(count: int) -> Any:
    """The first text of a process with "auto", relative to the default tree: medians."""
    commands = [[sys.executable, "-c", FIRST_TEXT.format(tree)] for tree in ("auto", None)] * count
    seconds = [float(subprocess.check_output(command)) for command in commands]
    return np.median(seconds[::2]) / np.median(seconds[1::2])


def longest_wait(pair: Pair) -> Any:
    """Milliseconds between two tokens of a second text, whose drafts are not those of the first."""
    random = np.random.default_rng(0).integers(0, pair.target.config.vocab_size, 64).tolist()
    way = dict(drafter=st.ModelDrafter(pair.draft), topology="auto", max_new_tokens=1500, key=0)
    for prompt, temperature in ((pair.prompts[0], 1.0), (random, 1.6)):
        text = st.stream(pair.target, [prompt], temperature=temperature, eos_token=(), **way)
        times = [time.perf_counter() for _ in text]
    return 1e3 * max(np.diff(times))


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All cases, one kind of weights after the other."""
    records: list[dict[str, Any]] = []
    met: dict[str, Any] = {}
    for quantize, temperature in itertools.product((None, "int8"), (0.0, 1.0)):
        how = dict(quantize=quantize, draft_quantize=quantize)
        pair = embedded_pair(max(options.prompts, 2 * options.rows), **how)
        if options.fresh and not records:
            met = {"first_text": first_texts(options.fresh), "stall_ms": longest_wait(pair)}
        records += compared(pair, (quantize or "float32", temperature), options)
        for aim in AIMS:
            met[aim] = f"{sum(row[aim] >= 0.97 for row in records)} of {len(records)}"
        forget_programs()
        yield Found(
            {"decoding": records, "met": met},
            [Table(str(met), records, {name: f"{{{name}}}" for name in COLUMNS})],
            line=met,
        )


if __name__ == "__main__":
    main(run, OPTIONS)
