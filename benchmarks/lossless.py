"""Is text with drafts that of autoregressive decoding? Ten families, ten drafters and trees.

At temperature 0, and at temperature 1 with shared noise; float32. Small models with random weights,
in sizes that the Pallas kernels accept. The draft is the target with noise on its weights, so that
it is often right, but not always. Rows are compared up to their first difference, and every first
difference is reported with both tokens and the gap of their logits. A product of another number of
rows may be rounded differently: a gap below 1e-4 of the largest logit, or at temperature 1 below
1e-3 in `log p + noise`, is a tie. Exit code 1 if any other token differs.

A run may be interrupted: the same command resumes it from `lossless.jsonl` in the results.

    python -m benchmarks.lossless [--tokens 1000000] [--families Mamba-2 ...]
        [--output DIR | --commit]                   default: benchmark-results; benchmarks/results
"""

import argparse
import functools
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stree_jax as st
from benchmarks.cases.base import random_tree
from benchmarks.common import conclude, machine, print_table, progress_bar, read_options, save
from benchmarks.families import FAMILIES
from stree_jax.decoding.sampling import position_noise
from stree_jax.testing import perturbed

PROMPT_LENGTHS = (37, 5, 64, 1)
ROWS = 16
NEW_TOKENS = 64  # of a row
TEMPERATURES = (0.0, 1.0)
NUM_METHODS = 10
NOISE = 0.02  # relative, on the draft's weights
TIE = 1e-4  # of the largest logit
SAMPLED_TIE = 1e-3  # of `log p + noise`
TREES = {
    "chain of 4": st.TreeTopology.chain(4),
    "tree A": st.TreeTopology.paper("A"),
    "random tree of 32": random_tree(32, seed=0),
}


def methods(model: st.HybridLM, draft: st.HybridLM) -> dict[str, dict[str, Any]]:
    """Ten ways to draft, as options of `generate`."""
    drafter = st.ModelDrafter(draft)
    heads = st.MedusaHeads(model, num_heads=3, rngs=nnx.Rngs(0))
    return {
        **{name: {"drafter": drafter, "topology": tree} for name, tree in TREES.items()},
        # More levels than are unrolled.
        "chain of 12": {"drafter": drafter, "topology": st.TreeTopology.chain(12)},
        "3 beams of 4": {"drafter": st.BeamDrafter(draft)},
        "dynamic tree of 16": {"drafter": st.DynamicDrafter(draft)},
        "prompt lookup": {
            "drafter": st.NgramDrafter(),
            "topology": st.TreeTopology.from_branching((3, 2, 1)),
        },
        "Medusa heads": {"drafter": st.MedusaDrafter(model, heads)},
        "two drafts in turns": {
            "drafter": st.InterleavedDrafter(draft, perturbed(draft, NOISE, 1), "qqss")
        },
        "cascade": {"drafter": st.CascadeDrafter(draft, st.NgramDrafter())},
    }


def check(
    config: st.ModelConfig,
    implementation: str,
    trees: Mapping[str, st.TreeTopology],
    *,
    tokens: int,
) -> dict[str, dict[str, Any]]:
    """Whether each tree gives the tokens of autoregressive decoding, on a ragged batch.

    `distinct` counts different tokens, to show that the model does not repeat itself. `differences`
    are the first ones of rows that differ, and `right` is whether all of them are ties.
    """
    model = st.HybridLM(config, rngs=nnx.Rngs(0), implementation=implementation)
    drafter = st.ModelDrafter(perturbed(model, NOISE, 1))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(config.vocab_size, size=size).tolist() for size in PROMPT_LENGTHS]
    decode = functools.partial(st.generate, model, prompts, max_new_tokens=tokens)
    want = decode().tokens
    rows = {}
    for name, topology in trees.items():
        out = decode(drafter=drafter, topology=topology)
        found = map(functools.partial(first_difference, model), prompts, want, out.tokens)
        differences = [
            {"row": row} | difference for row, difference in enumerate(found) if difference
        ]
        rows[name] = {
            "identical": not differences,
            "differences": differences,
            "right": all(difference["tie"] for difference in differences),
            "tau": out.stats.tau,
            "distinct": len(np.unique(want)),
        }
    return rows


def first_difference(
    model: st.HybridLM,
    prompt: Sequence[int],
    want: np.ndarray,
    got: np.ndarray,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> dict[str, Any] | None:
    """The first difference of two texts after a prompt; None if they are equal.

    The index, both tokens, and the gap of their scores, from the model run on prompt and common
    text as a sequence. Scores are logits, relative to the largest one, and above temperature 0
    `log p + noise`. A small gap is a tie.
    """
    if np.array_equal(want, got):
        return None
    place = int(np.flatnonzero(np.asarray(want) != np.asarray(got))[0])
    tokens = [int(want[place]), int(got[place])]
    text = [*prompt, *map(int, want[:place])]
    logits = jax.jit(model)(jnp.asarray([text]))[0, -1, : model.config.vocab_size]
    if temperature == 0:
        scores, limit = np.asarray(logits, np.float64), TIE
        scores /= np.max(np.abs(scores))
    else:
        noise = position_noise(key[None], jnp.array([place]), 0, len(logits))[0, 0]
        scores = np.asarray(jax.nn.log_softmax(logits / temperature) + noise)
        limit = SAMPLED_TIE
    gap = float(abs(np.subtract(*scores[tokens])))
    return {"place": place, "tokens": tokens, "gap": gap, "tie": gap < limit}


class Work(NamedTuple):
    """All rounds of one method with one model at one temperature."""

    family: str
    temperature: float
    method: str


def run(families: Sequence[str], rounds: int, done: set[Work]) -> Iterator[dict[str, Any]]:
    """Compares what is not in `done`; yields a row for each piece of work."""
    for family, temperature in itertools.product(families, TEMPERATURES):
        model = st.HybridLM(FAMILIES[family], rngs=nnx.Rngs(0))
        ways = methods(model, perturbed(model, NOISE, 1))
        left = [name for name in ways if Work(family, temperature, name) not in done]
        if left:
            batches = [
                batch(model.config.vocab_size, temperature, number) for number in range(rounds)
            ]
            plain = [decode(model, *each).tokens for each in batches]
        for name in left:
            began = time.perf_counter()
            row = compared(model, ways[name], batches, plain)
            seconds = time.perf_counter() - began
            yield Work(family, temperature, name)._asdict() | row | {"seconds": round(seconds, 2)}
        jax.clear_caches()  # the next family shares no program


class Batch(NamedTuple):
    """Prompts of a round and options of all methods."""

    prompts: list[list[int]]
    options: dict[str, Any]


def batch(vocab_size: int, temperature: float, number: int) -> Batch:
    """A ragged batch of random prompts, with keys of its own."""
    rng = np.random.default_rng(number)
    lengths = [PROMPT_LENGTHS[row % len(PROMPT_LENGTHS)] for row in range(ROWS)]
    keys = jax.random.split(jax.random.key(number), ROWS)
    return Batch(
        [rng.integers(vocab_size, size=size).tolist() for size in lengths],
        {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "key": keys},
    )


def decode(
    model: st.HybridLM, prompts: list[list[int]], options: Mapping[str, Any], **way: Any
) -> st.Generation:
    """A round of one method."""
    return st.generate(model, prompts, **options, **way)


def compared(
    model: st.HybridLM,
    way: Mapping[str, Any],
    batches: Sequence[Batch],
    plain: Sequence[np.ndarray],
) -> dict[str, Any]:
    """Counts, and the first difference of each row that differs."""
    tokens, calls, emitted, differences = 0, 0, 0, []
    for number, (each, want) in enumerate(zip(batches, plain, strict=True)):
        out = decode(model, *each, **way)
        calls, emitted = calls + out.stats.num_target_calls, emitted + out.stats.num_tokens
        same = np.cumprod(out.tokens == want, axis=1).sum(axis=1)  # up to the first difference
        tokens += int(np.minimum(same + 1, NEW_TOKENS).sum())
        for row in np.flatnonzero(same < NEW_TOKENS):
            temperature, key = each.options["temperature"], each.options["key"][row]
            found = first_difference(
                model, each.prompts[row], want[row], out.tokens[row], temperature, key
            )
            assert found is not None  # a row that differs
            differences.append({"round": number, "row": int(row)} | found)
    return {
        "tokens": tokens,
        "tau": emitted / calls,
        "distinct": len(np.unique(np.concatenate(plain))),
        "differences": differences,
        "right": all(each["tie"] for each in differences),
    }


class State:
    """The rows so far: a line of JSON for the settings, and one for each row.

    Raises:
        ValueError: the file is of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path, self.rows = path, []
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # killed while it was written
            path.write_text("".join(lines := lines[:-1]))
        if not lines:
            path.write_text(json.dumps(settings) + "\n")
        elif json.loads(lines[0]) != settings:
            raise ValueError(
                f"{path} is of a run with {lines[0].strip()}, and this one has"
                f" {json.dumps(settings)}; remove it or give another --output"
            )
        self.rows = [json.loads(line) for line in lines[1:]]

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row."""
        self.rows.append(dict(row))
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def done(self) -> set[Work]:
        """Pieces of work that need not be run again."""
        return {Work(*(row[field] for field in Work._fields)) for row in self.rows}


def by(field: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Sums of the rows that share a family or a method, for a table."""
    sums = []
    for name in dict.fromkeys(row[field] for row in rows):
        part = [row for row in rows if row[field] == name]
        gaps = [each["gap"] for row in part for each in row["differences"]]
        taus = [
            float(np.mean([row["tau"] for row in part if row["temperature"] == temperature]))
            for temperature in TEMPERATURES
        ]
        tokens = sum(row["tokens"] for row in part)
        sums.append((name, tokens, *taus, len(gaps), max(gaps, default=0.0)))
    return sums


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares, prints tables by family and by method, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="to compare, at least")
    options = read_options(parser, arguments)
    pieces = len(options.families) * len(TEMPERATURES) * NUM_METHODS
    rounds = math.ceil(options.tokens / (pieces * ROWS * NEW_TOKENS))
    where = machine()
    settings = {"families": options.families, "rounds": rounds, "rows": ROWS, "new": NEW_TOKENS}
    settings |= {name: where[name] for name in ("device", "jax")}
    try:
        state = State(options.output / "lossless.jsonl", settings)
    except ValueError as error:
        parser.error(str(error))
    with progress_bar() as progress:
        task = progress.add_task("", total=pieces, completed=len(state.rows))
        for row in run(options.families, rounds, state.done()):
            state.add(row)
            work = f"{row['family']}, temperature {row['temperature']:g}"
            progress.update(task, advance=1, description=work)
            if not row["right"]:
                progress.console.print(row)
    columns = ("tokens", "tau, T = 0", "tau, T = 1", "differences", "largest gap")
    for field in ("family", "method"):
        print_table("Against autoregressive decoding", (field, *columns), by(field, state.rows))
    differences = [
        {field: row[field] for field in Work._fields} | each
        for row in state.rows
        for each in row["differences"]
    ]
    for each in differences:
        print(each)
    seconds = sum(row["seconds"] for row in state.rows)
    tokens = sum(row["tokens"] for row in state.rows)
    results = {"machine": where, **settings, "tokens": tokens, "seconds": round(seconds)}
    path = save("lossless", __doc__, results | {"work": state.rows}, options.output)
    if options.commit:
        state.path.unlink()
    conclude(
        "lossless",
        passed=all(row["right"] for row in state.rows),
        tokens=tokens,
        tokens_per_second=round(tokens / seconds),
        differences=len(differences),
        wrong=[each for each in differences if not each["tie"]],
        results=str(path),
    )


if __name__ == "__main__":
    main()
