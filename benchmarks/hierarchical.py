"""Do three models decode faster than two, and is hierarchical speculative decoding exact?

Chen, "An Exploration of Hierarchical Speculative Decoding": a target p, a medium model q and a
small one s; n drafts of s and one of q, m times. The paper has no experiment. Three tables:

1. tokens a target call by theorem 3.2, by simulation, and measured, for m and n from 1 to 4;
2. how far algorithm 2 is from the target, enumerated on three tokens: as printed, with the index
   that table A.1 needs, and with the residual of whichever model drew the token (LOSSY but for the
   last, and in this benchmark only);
3. what is fastest here: no draft, each model alone, algorithm 2's order, the better model first, a
   cascade, and prompt lookup below a cascade.

The medium model is the embedded draft. The small one is trained with

    stree-jax distill benchmarks/recipes/small-draft.toml stree_jax/demo/target DIR/small-draft

    python -m benchmarks.hierarchical [--small DIR/small-draft] [--prompts 6] [--tokens 96]
        [--rounds 3] [--most 4] [--temperatures 0 1] [--output DIR | --commit]

Without --small there is nothing to measure in table 1, and table 3 has prompt lookup alone. Exit
code 1 if decoding gives other tokens than without drafts, or the corrected algorithm is not exact.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import (
    conclude,
    interleaved,
    machine,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.decode import Method, decoding_calls, measure_decoding, print_methods
from benchmarks.models import Pair, embedded_pair
from benchmarks.steps import run_steps

VOCAB, LENGTH = 3, 3  # of the enumeration
VERSIONS = ("printed", "indexed", "residual")
Law = Mapping[tuple[int, ...], np.ndarray]


def expected_tokens(a: float, b: float, m: int, n: int) -> float:
    """Theorem 3.2: tokens of a call with odds a for q and b for s, independent of all else."""
    whole = a * b**n
    inner = (1 - b ** (n + 1)) / (1 - b) if b < 1 else n + 1.0
    outer = (1 - whole**m) / (1 - whole) if whole < 1 else float(m)
    return inner * outer + whole**m


def expected_of_order(odds: Sequence[float]) -> float:
    """Tokens of a call whose drafts are kept with these odds if all before them are."""
    return 1 + float(np.cumprod(odds).sum())


def simulated(odds: Sequence[float], trials: int, rng: np.random.Generator) -> float:
    """The mean over trials of the same."""
    kept = rng.random((trials, len(odds))) < np.array(odds)
    return 1 + float(np.cumprod(kept, axis=1).sum(axis=1).mean())


def improvement(tokens: float, m: int, n: int, c: float, c_small: float) -> float:
    """Equation 3: speed against no drafts; c and c_small are costs of q by p and of s by q."""
    return tokens / (1 + m * c + m * n * c * c_small)


def random_laws(seed: int) -> tuple[Law, Law, Law]:
    """A target, a medium and a small model on `VOCAB` tokens, of which the drafts resemble it."""
    rng = np.random.default_rng(seed)
    target, medium, small = {}, {}, {}
    for size in range(LENGTH + 2):
        for prefix in itertools.product(range(VOCAB), repeat=size):
            p, q, s = rng.dirichlet(np.full(VOCAB, 0.7), size=3)
            target[prefix] = p
            medium[prefix] = 0.5 * p + 0.5 * q
            small[prefix] = 0.3 * p + 0.7 * s
    return target, medium, small


def algorithm_2(target: Law, drafts: Sequence[Law], version: str) -> np.ndarray:
    """The law of the first `LENGTH` tokens, by enumeration.

    Args:
        target: p.
        drafts: which model draws each draft.
        version: "printed" keeps the rejected token, as lines 14 to 16 do; "indexed" does not, and
            draws the next token from p; "residual" draws it from what is left of p.
    """
    joint = np.zeros((VOCAB,) * LENGTH)

    def complete(prefix: tuple[int, ...], weight: float) -> None:
        if len(prefix) >= LENGTH:
            joint[prefix[:LENGTH]] += weight
            return
        for token in range(VOCAB):
            complete((*prefix, token), weight * target[prefix][token])

    def draft(index: int, prefix: tuple[int, ...], weight: float) -> None:
        if index == len(drafts) or len(prefix) > LENGTH:
            complete(prefix, weight)
            return
        p, law = target[prefix], drafts[index][prefix]
        kept = np.minimum(p, law)
        for token in range(VOCAB):
            draft(index + 1, (*prefix, token), weight * kept[token])
            if version == "printed":
                complete((*prefix, token), weight * (law - kept)[token])
        if version != "printed":
            after = p if version == "indexed" else (p - kept) / max((p - kept).sum(), 1e-300)
            for token in range(VOCAB):
                complete((*prefix, token), weight * (1 - kept.sum()) * after[token])

    draft(0, (), 1.0)
    return joint


def distances(pattern: str, seeds: int) -> dict[str, float]:
    """The largest total variation from the target over random models, of each version."""
    worst = dict.fromkeys(VERSIONS, 0.0)
    for seed in range(seeds):
        target, medium, small = random_laws(seed)
        want = algorithm_2(target, [], "indexed")  # no drafts
        for version in VERSIONS:
            joint = algorithm_2(target, [{"q": medium, "s": small}[x] for x in pattern], version)
            worst[version] = max(worst[version], float(0.5 * np.abs(joint - want).sum()))
    return worst


def accepted_share(
    target: st.HybridLM, draft: st.HybridLM, prompts: list[list[int]], tokens: int
) -> float:
    """How often one draft of a model is kept at temperature 1, the paper's alpha and beta."""
    out = st.generate(
        target,
        prompts,
        max_new_tokens=tokens,
        drafter=st.ModelDrafter(draft, child_sampling="iid"),
        topology=st.TreeTopology.chain(1),
        verifier="multi_step",
        temperature=1.0,
        eos_token=(),
        key=jax.random.key(0),
    )
    return float(out.stats.accepted_per_depth[0] / out.stats.num_target_calls)


def measured_tokens(pair: Pair, small: st.HybridLM, pattern: str, tokens: int) -> float:
    """Tokens a target call with this pattern, tested from the first draft on, at temperature 1."""
    out = st.generate(
        pair.target,
        pair.prompts,
        max_new_tokens=tokens,
        drafter=st.InterleavedDrafter(pair.draft, small, pattern, child_sampling="iid"),
        verifier="multi_step",
        temperature=1.0,
        eos_token=(),
        key=jax.random.key(1),
    )
    return out.stats.tau


def seconds_of_calls(
    models: Mapping[str, st.HybridLM], advance: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Seconds of a call on one node, in turn."""
    count, root = 100, st.TreeTopology.chain(0)

    def run(model: st.HybridLM) -> Callable[[], object]:
        return lambda: run_steps(model, root, count).block_until_ready()

    calls = {name: run(model) for name, model in models.items()}
    for call in calls.values():
        call()
        advance()
    seconds = interleaved(calls, 5, advance)
    return {name: summary([s / count for s in values]) for name, values in seconds.items()}


def methods(medium: st.HybridLM, small: st.HybridLM | None) -> list[Method]:
    """What table 3 compares. Shared noise above temperature 0."""
    chain = st.TreeTopology.chain(4)
    ways = [
        Method("autoregressive", None, None),
        Method("q alone, chain of 4", st.ModelDrafter(medium), chain),
        Method("prompt lookup alone", st.NgramDrafter(), chain),
        _cascade("cascade of q and prompt lookup", medium, st.NgramDrafter(), 2),
    ]
    if small is not None:
        ways += [
            Method("s alone, chain of 4", st.ModelDrafter(small), chain),
            _turns("ssq ssq (the paper's order)", medium, small, "ssqssq"),
            _turns("qq ssss (the better model first)", medium, small, "qqssss"),
            _cascade("cascade of q and s", medium, st.ModelDrafter(small), 2),
        ]
    return ways


def _turns(name: str, medium: st.HybridLM, small: st.HybridLM, pattern: str) -> Method:
    drafter = st.InterleavedDrafter(medium, small, pattern)
    return Method(name, drafter, drafter.default_topology())


def _cascade(name: str, medium: st.HybridLM, inner: st.Drafter, rounds: int) -> Method:
    drafter = st.CascadeDrafter(medium, inner, rounds=rounds)
    return Method(name, drafter, drafter.default_topology())


def main(arguments: Sequence[str] | None = None) -> None:
    """Enumerates, simulates, measures, and prints the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", type=Path, help="checkpoint of the small model")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=4, help="largest m and n of table 1")
    parser.add_argument("--trials", type=int, default=400_000, help="of the simulation")
    parser.add_argument("--seeds", type=int, default=8, help="random models of the enumeration")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    options = read_options(parser, arguments)
    where = machine()
    pair = embedded_pair(options.prompts)
    small = None if options.small is None else st.from_pretrained(options.small)
    ways = methods(pair.draft, small)
    grid = [
        (m, n, ("s" * n + "q") * m)
        for m, n in itertools.product(range(1, options.most + 1), repeat=2)
    ]
    models = {"p": pair.target, "q": pair.draft} | ({} if small is None else {"s": small})

    with progress_bar() as progress:
        calls = len(options.temperatures) * decoding_calls(ways, pair.prompts, options.rounds)
        task = progress.add_task("costs", total=6 * len(models) + calls + 19 + len(grid))

        def advance() -> None:
            progress.advance(task)

        seconds = seconds_of_calls(models, advance)
        progress.update(task, description="enumeration")
        exactness = [
            {"order": pattern, "version": version, "total_variation": distance}
            for pattern in ("sq", "ssq", "qs")
            for version, distance in distances(pattern, options.seeds).items()
        ]
        progress.advance(task, 16)
        progress.update(task, description="acceptance")
        rates: dict[str, float] = {}
        if small is not None:
            for name, target, draft in (
                ("a: q by p", pair.target, pair.draft),
                ("b: s by p", pair.target, small),
                ("s by q", pair.draft, small),
            ):
                rates[name] = accepted_share(target, draft, pair.prompts, options.tokens)
                advance()
        a, b = rates.get("a: q by p", 0.8), rates.get("b: s by p", 0.6)
        rng = np.random.default_rng(0)
        lengths = []
        for m, n, pattern in grid:
            odds = [b if letter == "s" else a for letter in pattern]
            row: dict[str, Any] = {"m": m, "n": n, "formula": expected_tokens(a, b, m, n)}
            row["simulated"] = simulated(odds, options.trials, rng)
            row["best order"] = expected_of_order(sorted(odds, reverse=True))
            row["measured"] = None
            if small is not None and len(pattern) <= 16:  # `MAX_PATTERN`
                row["measured"] = measured_tokens(pair, small, pattern, options.tokens)
            if small is not None:
                c, c_small = _costs(seconds)
                row["improvement"] = improvement(row["formula"], m, n, c, c_small)
            lengths.append(row)
            advance()
        rows = []
        for temperature in options.temperatures:
            rows += measure_decoding(
                pair.target,
                ways,
                pair.prompts,
                tokens=options.tokens,
                temperature=temperature,
                rounds=options.rounds,
                progress=progress,
                task=task,
            )

    origin = "the paper's example" if small is None else "measured at temperature 1"
    print_table(
        f"1. Tokens a target call, a = {a:.3f} and b = {b:.3f} ({origin})",
        ("m", "n", "theorem 3.2", "simulated", "measured", "better model first"),
        [
            (
                *(row["m"], row["n"], f"{row['formula']:.3f}", f"{row['simulated']:.3f}"),
                "-" if row["measured"] is None else f"{row['measured']:.3f}",
                f"{row['best order']:.3f}",
            )
            for row in lengths
        ],
    )
    print_table(
        f"2. Total variation of the first {LENGTH} tokens from the target, worst of"
        f" {options.seeds} random triples on {VOCAB} tokens",
        ("order", *(f"{v}{'' if v == 'residual' else ' (LOSSY)'}" for v in VERSIONS)),
        [
            (order, *(f"{row['total_variation']:.1e}" for row in part))
            for order, part in itertools.groupby(exactness, key=lambda row: row["order"])
        ],
    )
    for temperature in options.temperatures:
        part = [row for row in rows if row["temperature"] == temperature]
        print_methods(
            f"3. {options.prompts} prompts ({pair.source}), {options.tokens} tokens, temperature"
            f" {temperature:g}",
            part,
            {},
        )
        best = max(part, key=lambda row: row["speed_up"]["median"])
        if best["method"] == "autoregressive":
            print("Do not draft: nothing is faster than no drafts here.")
        elif "cascade" not in best["method"] and " (" not in best["method"]:
            print(f"One level alone wins: {best['method']}.")
        else:
            print(f"Three levels win: {best['method']}.")
    results = pair.settings() | {
        "machine": where,
        "small": None if small is None else str(options.small),
        "seconds_of_a_call": seconds,
        "rates": rates,
        "lengths": lengths,
        "exactness": exactness,
        "decoding": rows,
    }
    path = save("hierarchical", __doc__, results, options.output)
    different = [row["method"] for row in rows if row["identical"] is False]
    corrected = max(r["total_variation"] for r in exactness if r["version"] == "residual")
    conclude(
        "hierarchical",
        passed=not different and corrected < 1e-12,
        corrected=corrected,
        different=different,
        results=str(path),
    )


def _costs(seconds: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """The paper's c and c_s."""
    p, q, s = (seconds[name]["median"] for name in "pqs")
    return q / p, s / q


if __name__ == "__main__":
    main()
