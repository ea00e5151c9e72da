"""The experiments by name, and the program that runs one of them.

An experiment takes the options of its command line and yields what it has found so far: prompts,
methods and temperatures go in; records and tables come out. The module of its name has its
question and its command: `python -m benchmarks.<name>`.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import stree_jax as st
from benchmarks import (
    attention_share,
    batch,
    common,
    grammar,
    lossless,
    methods,
    packed,
    peer,
    precision,
    seed,
    serving,
    steps,
    text,
    tree_size,
    tuned,
)
from benchmarks import temperature as by_temperature
from benchmarks.common import Found, Table, names
from benchmarks.methods import (
    CHAIN_OF_4,
    CHAIN_OF_6,
    DEEP_TREE,
    PAPER_TREES,
    PLAIN,
    TWO_TREES,
    Method,
    trees,
)
from benchmarks.models import chosen_pair, embedded_pair, random_model

SIZES = {"--prompts": 16, "--tokens": 96, "--rounds": 3}
COMPARED = SIZES | {"--temperatures": (0.0, 1.0)}
CHECKPOINTS = {"--target": None, "--draft": None, "--name": None}
HELP = {
    "--target": "checkpoint; default: the embedded target",
    "--draft": "checkpoint of its draft",
    "--name": "name of the pair, for the results",
    "--tokens": "new tokens of each text, at most",
    "--rounds": "timed runs",
    "--workloads": "words of their names; default: all",
    "--compared": "tokens to compare in each dtype",
    "--load": "requests over time, relative to what the plain scheduler serves",
}


def decode(options: argparse.Namespace) -> Iterator[Found]:
    """The paper's trees, a deep one, a dynamic one and prompt lookup; costs of target calls."""
    pair = chosen_pair(options, options.prompts)
    drafter = st.ModelDrafter(pair.draft)
    chains = {"chain of 4": CHAIN_OF_4, "chain of 6": CHAIN_OF_6}
    ways = [Method(PLAIN), *trees(drafter, chains)]
    if not options.target:
        ways += [Method("deep tree", drafter, DEEP_TREE), methods.dynamic_tree(pair.draft)]
    ways += [
        methods.prompt_lookup(),
        *trees(drafter, PAPER_TREES),
    ]
    # Exact in distribution, with tokens of its own: drafts are tested by their probabilities.
    iid = st.ModelDrafter(pair.draft, child_sampling="iid")
    tested = Method("chain of 4, traversal", iid, CHAIN_OF_4, "traversal")
    rows = []
    for temperature in options.temperatures:
        these = [*ways, tested] if temperature else ways
        rows += methods.compare(pair, these, [temperature], options)
        common.forget_programs()
    name = options.name or "embedded"
    larger = random_model(st.ModelConfig.preset("mamba2-130m"), "float32")
    calls = [
        steps.time_of_calls(f"{name} target", pair.target, 100),
        steps.time_of_calls(f"{name} draft", pair.draft, 100),
        steps.time_of_calls("mamba2-130m shape", larger, 5),
    ]
    drafting = [row for row in rows if row["nodes"] > 1]
    best = max(drafting, key=lambda row: (-row["temperature"], row["speed_up"]["median"]))
    of_calls = Table("Milliseconds of a call", calls, steps.COLUMNS)
    yield Found(
        pair.settings() | {"decoding": rows, "target_calls": calls},
        [*methods.method_tables(pair.name, rows), of_calls],
        wrong=methods.different(rows),
        line={"best": best["method"], "speed_up": best["speed_up"]["median"], "tau": best["tau"]},
    )


def medusa(options: argparse.Namespace) -> Iterator[Found]:
    """Heads of two kinds, a draft model and prompt lookup."""
    pair = embedded_pair(options.prompts)
    heads = st.load_medusa(options.heads or st.demo_path("medusa"), pair.target)
    drafter, draft = st.MedusaDrafter(pair.target, heads), st.ModelDrafter(pair.draft)
    chain = st.TreeTopology.chain(heads.num_heads)
    ways = [
        Method(PLAIN),
        Method(f"Medusa, chain of {chain.depth}", drafter, chain),
        methods.own_tree("Medusa, default tree", drafter),
        *trees(draft, TWO_TREES, "draft model, "),
        methods.prompt_lookup(),
    ]
    if options.mtp is not None:
        own = st.MtpDrafter(pair.target, st.load_mtp(options.mtp, pair.target))
        few = {"chain of 2": st.TreeTopology.chain(2)} | TWO_TREES
        ways += trees(own, few, "multi-token prediction, ")
    yield methods.found(pair, ways, options)


def hierarchical(options: argparse.Namespace) -> Iterator[Found]:
    """Two draft models, q and s, and prompt lookup: alone, in turns and as cascades."""
    pair, lookup = embedded_pair(options.prompts), st.NgramDrafter()
    q = pair.draft
    ways = [
        Method(PLAIN),
        Method("q alone, chain of 4", st.ModelDrafter(q), CHAIN_OF_4),
        Method("prompt lookup alone", lookup, CHAIN_OF_4),
        methods.own_tree("cascade of q and prompt lookup", st.CascadeDrafter(q, lookup, rounds=2)),
    ]
    if options.small is not None:
        small = st.from_pretrained(options.small)
        s = st.ModelDrafter(small)
        turns = {"ssq ssq (the paper's order)": "ssqssq", "qq ssss (the better first)": "qqssss"}
        ways += [
            Method("s alone, chain of 4", s, CHAIN_OF_4),
            *(
                methods.own_tree(name, st.InterleavedDrafter(q, small, x))
                for name, x in turns.items()
            ),
            methods.own_tree("cascade of q and s", st.CascadeDrafter(q, s, rounds=2)),
        ]
    yield methods.found(pair, ways, options)


class Experiment(NamedTuple):
    """An experiment and its options: defaults, or arguments of `argparse`, by flag."""

    run: Callable[[argparse.Namespace], Iterator[Found]]
    options: Mapping[str, Any]


EXPERIMENTS = {
    "decode": Experiment(decode, COMPARED | CHECKPOINTS),
    "tuned": Experiment(tuned.run, COMPARED | CHECKPOINTS | {"--prompts": 12}),
    "peer": Experiment(peer.run, SIZES | {"--threads": 2, "--calls": 8}),
    "precision": Experiment(precision.run, SIZES | {"--compared": 100_000}),
    "medusa": Experiment(medusa, COMPARED | {"--prompts": 8, "--heads": None, "--mtp": None}),
    "serving": Experiment(
        serving.run,
        {"--workloads": {"nargs": "+"}, "--requests": 32, "--rows": 8, "--load": 0.7}
        | {"--rounds": 3},
    ),
    "hierarchical": Experiment(hierarchical, COMPARED | {"--prompts": 6, "--small": None}),
    "seed": Experiment(
        seed.run,
        {"--tasks": names(seed.K_CONFIGS)}
        | {"--problems": 2, "--rounds": 2, "--chain": 4, "--rows": 8},
    ),
    "lossless": Experiment(
        lossless.run, {"--families": names(lossless.FAMILIES), "--tokens": 1_000_000}
    ),
    "attention_share": Experiment(
        attention_share.run,
        COMPARED | {"directory": {"type": Path}, "--prompts": 12, "--tokens": 64},
    ),
    "batch": Experiment(batch.run, {"--batches": (1, 2, 4, 8), "--tokens": 96, "--rounds": 5}),
    "packed": Experiment(
        packed.run,
        {"--beams": (2, 4), "--steps": (4, 8), "--prompts": 4, "--tokens": 100, "--rounds": 5},
    ),
    "grammar": Experiment(
        grammar.run,
        {"--states": 10_000, "--vocabulary": 50_000, "--steps": 50, "--rounds": 7},
    ),
    "text": Experiment(text.run, {"--tokens": (1000, 16_000), "--rounds": 3}),
    "temperature": Experiment(
        by_temperature.run, {"--prompts": 8, "--tokens": 96, "--keys": 5, "--rounds": 1}
    ),
    "tree_size": Experiment(
        tree_size.run,
        {"--preset": None, "--layers": {"type": int}, "--rounds": 7}
        | {"--dtype": {"choices": ("float32", "bfloat16")}},
    ),
}


def main(name: str, doc: str, arguments: Sequence[str] | None = None) -> None:
    """Runs an experiment: prints its tables and writes JSON; exit code 1 if it failed.

    Args:
        name: the experiment's name.
        doc: docstring of its module, which begins with the question.
        arguments: the command line; None: `sys.argv`.
    """
    experiment = EXPERIMENTS[name]
    parser = common.parser_of(doc, experiment.options, HELP)
    options = common.read_options(parser, arguments)
    if len({bool(getattr(options, flag[2:])) for flag in CHECKPOINTS if "name" in options}) > 1:
        parser.error("--target, --draft and --name come together")
    where = common.machine()  # before the experiment loads it
    settings = {
        flag: str(value) if isinstance(value, Path) else value
        for flag, value in vars(options).items()
        if flag not in ("output", "commit") and value is not None
    }
    parts = (name.replace("_", "-"), settings.get("name"), common.device_name(where))
    file_name = "-".join(filter(None, parts))
    head = {"question": doc.splitlines()[0], "machine": where} | settings
    for found in experiment.run(options):  # results so far are saved before the next part
        path = common.write_json(file_name, head | found.results, options.output)
    for table in found.tables:
        table.show()
    line = found.line | {"different": found.wrong, "results": str(path)}
    common.conclude(name, passed=not found.wrong, **line)
