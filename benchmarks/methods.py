"""The lists of methods that experiments compare, and the comparison."""

from collections.abc import Mapping, Sequence
from typing import Any

import stree_jax as st
from benchmarks.common import Found
from benchmarks.models import Pair
from stree_jax.measuring import methods as measuring
from stree_jax.measuring.methods import Method, different
from stree_jax.measuring.report import method_tables, progress_bar

CHAIN_OF_4 = st.TreeTopology.chain(4)
# A chain of 8 and one second choice: what it chose for the first embedded pair.
DEEP_TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 3, 4, 5, 6, 7, 8])
PAPER_TREES = {f"tree {name}": st.TreeTopology.paper(name) for name in "ABCDE"}
TWO_TREES = {"chain of 4": CHAIN_OF_4, "tree A": PAPER_TREES["tree A"]}
# What `tune-tree` chose for the embedded pair at temperature 0 and at 1, and a longer chain.
TUNED_TREES = {
    "chain of 4": CHAIN_OF_4,
    "tree of 5": st.TreeTopology.default(),
    "chain of 6": st.TreeTopology.chain(6),
}

# Options of experiments that compare methods.
SIZES = {"--prompts": 16, "--tokens": 96, "--rounds": 3}
COMPARED = SIZES | {"--temperatures": (0.0, 1.0)}


def trees(
    drafter: st.Drafter, topologies: Mapping[str, st.TreeTopology], prefix: str = ""
) -> list[Method]:
    """A method for each topology, all with one drafter."""
    return [Method(prefix + name, drafter, topology) for name, topology in topologies.items()]


def compare(
    pair: Pair,
    methods: Sequence[Method],
    temperature: float,
    options: Any,
    requests: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The comparison of `stree_jax.measuring` with an experiment's settings.

    Args:
        pair: target and prompts.
        methods: ways of decoding, `PLAIN` among them.
        temperature: of all of them.
        options: `tokens`, the limit of each text, and `rounds`, the timed runs of each request.
        requests: arguments of `Method.decode`; None: each prompt by itself.
    """
    own = {"max_new_tokens": options.tokens, "temperature": temperature}
    given = [each | own for each in requests or [{"prompts": [prompt]} for prompt in pair.prompts]]
    with progress_bar() as show:
        *_, rows = measuring.compare(pair.target, methods, given, options.rounds, show)
    return rows


def found(pair: Pair, methods: Sequence[Method], options: Any) -> Found:
    """All findings of an experiment that compares methods at the temperatures of its options."""
    rows = [row for t in options.temperatures for row in compare(pair, methods, t, options)]
    tables = method_tables(f"{pair.name}, {options.prompts} prompts", rows)
    return Found(pair.settings() | {"decoding": rows}, tables, wrong=different(rows))
