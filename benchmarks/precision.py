"""What does bfloat16 gain, and does a tree still give the text of autoregressive decoding?

Decodes the same prompts one at a time with the embedded pair as float32 and as bfloat16, all
interleaved. Then decodes batches with all methods, at temperature 0 and with shared noise at
temperature 1, until `--compared` tokens of each dtype were compared with those of autoregressive
decoding in the same dtype, and reports each row's first difference with the gap of the two tokens'
scores. In float32 there must be none but ties.

    python -m benchmarks.precision [--prompts 16] [--tokens 96] [--rounds 3] [--compared 100000]
        [--output DIR | --commit]
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.progress import track

import stree_jax as st
from benchmarks.common import Found, Table, main, num_bytes, summary
from benchmarks.lossless import Way, compared, sums
from benchmarks.methods import (
    DEEP_TREE,
    PAPER_TREES,
    PLAIN,
    SIZES,
    TWO_TREES,
    Method,
    compare,
    trees,
)
from benchmarks.models import Pair, embedded_pair

OPTIONS = SIZES | {"--compared": 100_000}

DTYPES = ("float32", "bfloat16")
ROWS = 32  # of a batch whose tokens are compared
LENGTH = 64  # of its prompts
FIELDS = {
    "tokens/s": "tokens_per_second][median]:,.0f",
    "tau": "tau]:.2f",
    "ms a call": "milliseconds]:.2f",
}
COLUMNS = {"method": "{method}", "nodes": "{nodes}"} | {
    f"{dtype}, {name}": f"{{{dtype}[{field}}}" for dtype in DTYPES for name, field in FIELDS.items()
}


def methods(pair: Pair) -> list[Method]:
    """No drafts, and trees of 5, 10, 13 and 29 nodes."""
    some = {"deep tree": DEEP_TREE} | TWO_TREES | {"tree B": PAPER_TREES["tree B"]}
    return [Method(PLAIN), *trees(st.ModelDrafter(pair.draft), some)]


def speeds(exact: Pair, rounded: Pair, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each method: its speed in both types, and their ratio."""
    ways = methods(exact)
    others = [
        method._replace(name=f"{method.name}, rounded", target=rounded.target)
        for method in methods(rounded)
    ]
    found = {row["method"]: row for row in compare(exact, ways + others, 0.0, options)}
    rows = []
    for method, other in zip(ways, others, strict=True):
        of_dtype = dict(zip(DTYPES, (found[method.name], found[other.name]), strict=True))
        for row in of_dtype.values():
            row["milliseconds"] = 1e3 * row["tau"] / row["tokens_per_second"]["median"]  # a call
        one, two = (np.array(row["tokens_per_second_by_round"]) for row in of_dtype.values())
        row = {"method": method.name, "nodes": method.num_nodes, "ratio": summary(two / one)}
        rows.append(row | of_dtype)
    return rows


def exactness(pair: Pair, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each method and temperature: tokens compared, and first differences."""
    drafting = methods(pair)[1:]
    pieces = len(drafting) * 2
    rounds = -(-options.compared // (pieces * ROWS * options.tokens))
    prompts = [prompt[:LENGTH] for prompt in embedded_pair(rounds * ROWS).prompts]
    for temperature in (0.0, 1.0):
        requests = [
            {
                "prompts": prompts[n * ROWS : (n + 1) * ROWS],
                "max_new_tokens": options.tokens,
                "temperature": temperature,
                "key": jax.random.split(jax.random.key(n), ROWS),
                "eos_token": (),
            }
            for n in range(rounds)
        ]
        plain = [st.generate(pair.target, **given).tokens for given in requests]
        for method in drafting:
            row = compared(pair.target, Way(method), requests, plain)
            yield {"method": method.name, "temperature": temperature} | row


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Speed in both types, then exactness in both."""
    pairs = {dtype: embedded_pair(options.prompts, None, dtype) for dtype in DTYPES}
    megabytes = {dtype: num_bytes(pair.target) / 1e6 for dtype, pair in pairs.items()}
    rows = speeds(*pairs.values(), options)
    columns = COLUMNS | {"bfloat16 / float32": "{ratio[median]:.2f}x"}
    tables = [Table(f"{pairs['float32'].name}, {options.prompts} prompts", rows, columns)]
    results = {"megabytes": megabytes, "decoding": rows}
    line = {row["method"]: round(row["ratio"]["median"], 2) for row in rows}
    yield Found(results, tables, line=line)
    found = {
        dtype: [*track(exactness(pair, options), dtype, 2 * len(rows) - 2, transient=True)]
        for dtype, pair in pairs.items()
    }
    by_dtype = sums("dtype", [{"dtype": name} | row for name in found for row in found[name]])
    columns = {name: f"{{{name}}}" for name in ("dtype", "tokens", "differences", "ties")}
    columns |= {"median gap": "{median:.1e}", "largest gap": "{largest:.1e}"}
    wrong = [row["method"] for row in found["float32"] if not row["right"]]
    tables += [Table("Against autoregressive decoding in the same dtype", by_dtype, columns)]
    yield Found(results | {"exactness": found, "sums": by_dtype}, tables, wrong, line)


if __name__ == "__main__":
    main(run, OPTIONS)
