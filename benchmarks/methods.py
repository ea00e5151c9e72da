"""Which way of decoding is the fastest? A table of comparisons, and the lists of ways in them.

    python -m benchmarks.methods auto --rows 1 8 [--quantize int8]
    python -m benchmarks.methods batch --rows 1 2 4 8 --temperatures 0
    python -m benchmarks.methods hierarchical --small DIR/small-draft
    python -m benchmarks.methods medusa [--heads DIR] [--mtp DIR] [--dflash DIR]
    python -m benchmarks.methods precision --temperatures 0
    python -m benchmarks.methods temperature --rows 8 --temperatures 0 0.4 0.8 1 1.3

The embedded pair decodes the same prompts, cut to one length, in all ways of a comparison in turn:
one at a time, or as batches of `--rows`. Ways that follow the target must give the tokens of
autoregressive decoding with the same key, the others at temperature 0. The small model of
`hierarchical` and the heads of `--mtp` and `--dflash` are made with `benchmarks/recipes`.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.models import Pair, embedded_pair
from stree_jax.decoding import quanta
from stree_jax.measuring import methods as measuring
from stree_jax.measuring.methods import LOOKUP, PLAIN, Method, different
from stree_jax.measuring.record import Record
from stree_jax.measuring.report import method_tables, progress_bar
from stree_jax.testing import perturbed

CHAIN_OF_4 = st.TreeTopology.chain(4)
# A chain of 8 and one second choice: what it chose for the first embedded pair.
DEEP_TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 3, 4, 5, 6, 7, 8])
PAPER_TREES = {f"tree {name}": st.TreeTopology.paper(name) for name in "ABCDE"}
TWO_TREES = {"chain of 4": CHAIN_OF_4, "tree A": PAPER_TREES["tree A"]}
TWO_DEFAULTS = {"chain of 4": CHAIN_OF_4, "tree of 5": st.TreeTopology.default()}
# What `tune-tree` chose for the embedded pair at temperature 0 and at 1, and other chains.
TUNED_TREES = {
    **TWO_DEFAULTS,
    "chain of 2": "chain:2",
    "chain of 6": "chain:6",
}
# How children are sampled and verified above temperature 0.
RULES = {
    "shared noise": ("shared", "target_only"),
    "traversal": ("without_replacement", "traversal"),
    "multi-step": ("iid", "multi_step"),
    "without replacement": ("without_replacement", "without_replacement"),
    "naive": ("top_k", "target_only"),
}
TYPES = {
    "bfloat16": {"dtype": "bfloat16"},
    "drafts in int8": {"draft_quantize": "int8"},
    "int8": {"quantize": "int8"},
    "int8, drafts too": {"quantize": "int8", "draft_quantize": "int8"},
    "int4, drafts too": {"quantize": "int4", "draft_quantize": "int4"},
}

# Options of experiments that compare methods.
SIZES = {"--prompts": 16, "--tokens": 96, "--rounds": 3}
COMPARED = SIZES | {"--temperatures": (0.0, 1.0)}

Ways = Iterable[Method]


def trees(
    drafter: st.Drafter, topologies: Mapping[str, st.TreeTopology | str], prefix: str = ""
) -> list[Method]:
    """A method for each topology, all with one drafter."""
    return [Method(prefix + name, drafter, topology) for name, topology in topologies.items()]


def auto(pair: Pair, at: float, options: argparse.Namespace) -> Iterator[Method]:
    """Is a choice of trees as fast as the best fixed one, and never slower than none?

    No drafts are timed twice: what these two differ by, the clock cannot tell.
    """
    yield Method(f"{PLAIN} again")
    drafters = {
        "draft model": st.ModelDrafter(pair.draft),
        "random draft": st.ModelDrafter(perturbed(pair.draft, 10.0, 1)),
        "prompt lookup": st.NgramDrafter(),
        "Medusa": medusa_drafter(pair, options),
    }
    for name, drafter in drafters.items():
        yield from trees(drafter, TWO_DEFAULTS | {"auto": "auto"}, f"{name}, ")


def batch(pair: Pair, at: float, options: argparse.Namespace) -> Ways:
    """At which batch size does speculation stop paying off?"""
    return trees(st.ModelDrafter(pair.draft), TWO_TREES)


def hierarchical(pair: Pair, at: float, options: argparse.Namespace) -> Iterator[Method]:
    """Do three models decode faster than two?

    Chen, "An Exploration of Hierarchical Speculative Decoding": the target, and the draft q and a
    small model s in turns with either first. Each drafter alone, and prompt lookup, for comparison.
    """
    q = pair.draft
    yield Method("q alone, chain of 4", st.ModelDrafter(q), CHAIN_OF_4)
    yield Method("prompt lookup alone", st.NgramDrafter(), CHAIN_OF_4)
    if options.small is not None:
        s = st.from_pretrained(options.small)
        yield Method("s alone, chain of 4", st.ModelDrafter(s), CHAIN_OF_4)
        for name, order in {"the paper's order": "ssqssq", "the better first": "qqssss"}.items():
            yield Method(f"{order} ({name})", st.InterleavedDrafter(q, s, order))


def medusa_drafter(pair: Pair, options: argparse.Namespace) -> st.MedusaDrafter:
    """The embedded heads, or others."""
    path = options.heads or st.demo_path("medusa")
    return st.MedusaDrafter(pair.target, st.load_medusa(path, pair.target))


def medusa(pair: Pair, at: float, options: argparse.Namespace) -> Iterator[Method]:
    """Do Medusa heads draft better than a draft model or prompt lookup on this machine?"""
    drafter = medusa_drafter(pair, options)
    depth = drafter.heads.num_heads
    yield from trees(drafter, {f"chain of {depth}": f"chain:{depth}"} | TWO_TREES, "Medusa, ")
    yield from trees(st.ModelDrafter(pair.draft), TWO_TREES, "draft model, ")
    yield LOOKUP
    few = {"chain of 2": "chain:2"} | TWO_TREES
    for name, path, load, make in (
        ("multi-token prediction", options.mtp, st.load_mtp, st.MtpDrafter),
        ("DFlash", options.dflash, st.load_dflash, st.DFlashDrafter),
    ):
        if path is not None:
            yield from trees(make(pair.target, load(path, pair.target)), few, f"{name}, ")


def precision(pair: Pair, at: float, options: argparse.Namespace) -> Iterator[Method]:
    """How much do bfloat16 and 8 bits gain?"""
    some = {"deep tree": DEEP_TREE} | TWO_TREES | {"tree B": PAPER_TREES["tree B"]}
    yield from trees(st.ModelDrafter(pair.draft), some)
    for name, how in TYPES.items():
        own = embedded_pair(0, None, **how)
        ways = trees(st.ModelDrafter(own.draft), some)
        ways += [] if "draft_quantize" in how else [Method(PLAIN)]  # the target alone is there
        target = None if how.keys() == {"draft_quantize"} else own.target
        yield from (way._replace(name=f"{way.name}, {name}", target=target) for way in ways)


def temperature(pair: Pair, at: float, options: argparse.Namespace) -> Iterator[Method]:
    """How does acceptance fall with temperature, and which rule keeps it up (STree, figure 4)?

    Noise that the target shares; drafts that are tested, by traversal, multi-step ("vanilla" on a
    chain) or without replacement; the top children and the target's own tokens ("naive").
    """
    for (tree, topology), (rule, how) in itertools.product(TWO_TREES.items(), RULES.items()):
        sampling, verifier = how if at else ("top_k", "greedy")
        drafter = st.ModelDrafter(pair.draft, child_sampling=sampling)
        yield Method(f"{rule}, {tree}", drafter, topology, verifier)


COMPARISONS: dict[str, Callable[[Pair, float, argparse.Namespace], Ways]] = {
    each.__name__: each for each in (auto, batch, hierarchical, medusa, precision, temperature)
}
OPTIONS = {"comparison": {"choices": [*COMPARISONS]}, **COMPARED, "--rows": (1,)}
OPTIONS |= dict.fromkeys(("--dflash", "--heads", "--mtp", "--quantize", "--small"))


def compare(
    pair: Pair, methods: Sequence[Method], temperature: float, options: Any, rows: int = 1
) -> list[Record]:
    """The comparison of `stree_jax.measuring` with an experiment's settings.

    Several rows of a request run to their limit, past any end, so that the batch stays full.
    """
    ends = () if rows > 1 else None
    how = st.Options(max_new_tokens=options.tokens, temperature=temperature, eos_token=ends, key=0)
    starts = range(0, len(pair.prompts) - rows + 1, rows)
    batches = [measuring.Batch(pair.prompts[start : start + rows], how) for start in starts]
    for way in [way for way in methods if way.topology == "auto"] * 8:
        way.decode(pair.target, batches[0])
        quanta.BESIDE.submit(int).result()  # what the text began to compile is there
    with progress_bar() as show:
        *_, records = measuring.compare(pair.target, methods, batches, options.rounds, show)
    return records


def run(options: argparse.Namespace) -> Iterator[Found]:
    """All ways of a comparison, at each temperature and number of rows."""
    chosen, how = COMPARISONS[options.comparison], options.quantize
    pair = embedded_pair(options.prompts, quantize=how, draft_quantize=how)
    records: list[Record] = []
    for temperature, rows in itertools.product(options.temperatures, options.rows):
        ways = [Method(PLAIN), *chosen(pair, temperature, options)]
        records += compare(pair, ways, temperature, options, rows)
        yield Found(
            pair.settings()
            | {"quantize": how, "question": str(chosen.__doc__).splitlines()[0]}
            | {"decoding": [record.to_dict() for record in records]},
            method_tables(f"{pair.name}, {options.prompts} prompts", records, batch="{rows}"),
            wrong=different(records),
        )


if __name__ == "__main__":
    main(run, OPTIONS)
