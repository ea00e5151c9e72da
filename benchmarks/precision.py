"""What do bfloat16 and 8 bits gain and cost, and is a text with drafts still the type's own?

Decodes the same prompts one at a time with the embedded pair in several types, all interleaved, and
counts what the types change: the perplexity of the prompts, and the greedy texts. Then decodes
batches with all methods, at temperature 0 and with shared noise at temperature 1, until
`--compared` tokens of each type were compared with those of autoregressive decoding in the same
type, and reports each row's first difference with the gap of the two tokens' scores. There must be
none but ties.

    python -m benchmarks.precision [--prompts 16] [--tokens 96] [--rounds 3] [--compared 100000]
        [--output DIR | --commit]
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from rich.progress import track

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.lossless import Way, compared, sums
from benchmarks.methods import DEEP_TREE, PAPER_TREES, SIZES, TWO_TREES, compare, trees
from benchmarks.models import Pair, embedded_pair
from stree_jax.measuring.clock import num_bytes, summary
from stree_jax.measuring.methods import PLAIN, Method
from stree_jax.measuring.report import Table

OPTIONS = SIZES | {"--compared": 100_000}

TYPES: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int8, drafts too": {"quantize": "int8", "draft_quantize": "int8"},
    "drafts in int8": {"draft_quantize": "int8"},
}
TARGETS = [name for name, options in TYPES.items() if "draft_quantize" not in options]
ROWS = 32  # of a batch whose tokens are compared
LENGTH = 64  # of its prompts
COLUMNS = {
    "weights": "{weights}",
    "method": "{method}",
    "nodes": "{nodes}",
    "tokens/s": "{tokens_per_second[median]:,.0f}",
    "tau": "{tau:.2f}",
    "ms a call": "{milliseconds:.2f}",
    "float32 = 1": "{ratio[median]:.2f}x",
}
COST = {
    "weights": "{weights}",
    "MB": "{megabytes:.1f}",
    "perplexity": "{perplexity:.2f}",
    "texts that are float32's": "{equal} of {texts}",
    "first difference, median token": "{first:.0f}",
}


def methods(pair: Pair) -> list[Method]:
    """No drafts, and trees of 5, 10, 13 and 29 nodes."""
    some = {"deep tree": DEEP_TREE} | TWO_TREES | {"tree B": PAPER_TREES["tree B"]}
    return [Method(PLAIN), *trees(st.ModelDrafter(pair.draft), some)]


def speeds(pairs: Mapping[str, Pair], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each method and type: its speed, and the ratio to that of float32."""
    exact, *_ = pairs.values()
    ways = {
        (weights, way.name): way._replace(
            name=way.name if pair is exact else f"{way.name}, {weights}", target=pair.target
        )
        for weights, pair in pairs.items()
        for way in methods(pair)
        # The target alone is there already.
        if way.name != PLAIN or weights in TARGETS
    }
    found = dict(zip(ways, compare(exact, [*ways.values()], 0.0, options), strict=True))
    rows = []
    for (weights, method), row in found.items():
        rounds, base = (
            np.array(each["tokens_per_second_by_round"]) for each in (row, found["float32", method])
        )
        seconds = row["tau"] / row["tokens_per_second"]["median"]  # a call
        named = {"weights": weights, "method": method, "milliseconds": 1e3 * seconds}
        rows.append(row | named | {"ratio": summary(rounds / base)})
    return rows


def costs(pairs: Mapping[str, Pair], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each type of target: bytes, the prompts' perplexity, and greedy texts."""
    texts: dict[str, np.ndarray] = {}
    for weights, pair in pairs.items():
        if weights not in TARGETS:
            continue
        found = [
            st.generate(pair.target, [prompt], max_new_tokens=options.tokens, eos_token=()).tokens
            for prompt in pair.prompts
        ]
        texts[weights] = np.concatenate(found)
        differs = texts[weights] != texts["float32"]
        first = differs.argmax(axis=1)[differs.any(axis=1)]
        loss = -np.concatenate(st.score(pair.target, pair.prompts)).mean()
        yield {
            "weights": weights,
            "megabytes": num_bytes(pair.target) / 1e6,
            "perplexity": float(np.exp(loss)),
            "texts": len(differs),
            "equal": len(differs) - len(first),
            "first": float(np.median(first)) if len(first) else math.nan,
        }


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
    """What the types cost and gain, then exactness in each."""
    pairs = {name: embedded_pair(options.prompts, None, **each) for name, each in TYPES.items()}
    name = f"{pairs['float32'].name}, {options.prompts} prompts"
    rows, cost = speeds(pairs, options), [*costs(pairs, options)]
    tables = [Table(name, rows, COLUMNS), Table("What a type changes", cost, COST)]
    results = {"costs": cost, "decoding": rows}
    line = {f"{row['weights']}, {row['method']}": round(row["ratio"]["median"], 2) for row in rows}
    yield Found(results, tables, line=line)
    found = {
        weights: [*track(exactness(pair, options), weights, transient=True)]
        for weights, pair in pairs.items()
    }
    by_type = sums("weights", [{"weights": name} | row for name in found for row in found[name]])
    columns = {name: f"{{{name}}}" for name in ("weights", "tokens", "differences", "ties")}
    columns |= {"median gap": "{median:.1e}", "largest gap": "{largest:.1e}"}
    wrong = [
        f"{weights}, {row['method']}"
        for weights in found
        for row in found[weights]
        if not row["right"]
    ]
    tables += [Table("Against autoregressive decoding in the same type", by_type, columns)]
    yield Found(results | {"exactness": found, "sums": by_type}, tables, wrong, line)


if __name__ == "__main__":
    main(run, OPTIONS)
