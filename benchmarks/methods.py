"""Methods of decoding, the lists of methods that experiments compare, and the comparison."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import SPEED, Found, Table, speeds, timed
from benchmarks.models import Pair

PLAIN = "autoregressive"
CHAIN_OF_4 = st.TreeTopology.chain(4)
CHAIN_OF_6 = st.TreeTopology.chain(6)  # what `tune-tree` chose for the embedded pair
# A chain of 8 and one second choice: what it chose for the first embedded pair.
DEEP_TREE = st.TreeTopology.from_parents([-1, 0, 0, 1, 3, 4, 5, 6, 7, 8])
PAPER_TREES = {f"tree {name}": st.TreeTopology.paper(name) for name in "ABCDE"}
TWO_TREES = {"chain of 4": CHAIN_OF_4, "tree A": PAPER_TREES["tree A"]}
CHAINS = {"chain of 4": CHAIN_OF_4, "chain of 6": CHAIN_OF_6}

# Options of experiments that compare methods.
SIZES = {"--prompts": 16, "--tokens": 96, "--rounds": 3}
COMPARED = SIZES | {"--temperatures": (0.0, 1.0)}


class Method(NamedTuple):
    """A way of decoding; autoregressive without a drafter, whose own tree is the default."""

    name: str
    drafter: st.Drafter | None = None
    topology: st.TreeTopology | None = None
    verifier: str | None = None
    target: st.HybridLM | None = None  # None: that of the pair

    @property
    def num_nodes(self) -> int:
        """Nodes of its tree, root included."""
        tree = self.topology or (self.drafter and self.drafter.default_topology())
        return tree.num_nodes if tree else 1

    @property
    def follows_target(self) -> bool:
        """Whether its tokens are those of the pair's target with the same key."""
        return self.target is None and self.verifier in (None, "greedy", "target_only")

    def decode(
        self,
        pair: Pair,
        prompts: Sequence[list[int]],
        tokens: int,
        temperature: float = 0.0,
        **options: Any,
    ) -> st.Generation:
        """A batch, with key 0 unless `options` have another."""
        given: dict[str, Any] = dict(max_new_tokens=tokens, temperature=temperature)
        given |= {"key": jax.random.key(0)} | options
        return st.generate(self.target or pair.target, prompts, **given, **self.options())

    def options(self) -> dict[str, Any]:
        """Its options of `stree_jax.generate`."""
        chosen = {"drafter": self.drafter, "topology": self.topology, "verifier": self.verifier}
        return {name: value for name, value in chosen.items() if value is not None}


# Drafts that are copied from the text so far.
LOOKUP = Method("prompt lookup, chain of 4", st.NgramDrafter(), CHAIN_OF_4)


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
    """Decodes requests one at a time with every method, interleaved request by request.

    Args:
        pair: target and prompts.
        methods: ways of decoding, `PLAIN` among them.
        temperature: of all of them.
        options: `tokens`, the limit of each text, and `rounds`, the timed runs of each request.
        requests: arguments of `Method.decode`; None: each prompt by itself.

    Returns:
        A record for each method: speed, tau, and whether its tokens are `PLAIN`'s.
    """

    def decode(method: Method, request: Any) -> st.Generation:
        return method.decode(pair, tokens=options.tokens, temperature=temperature, **request)

    rows, requests = [], requests or [{"prompts": [prompt]} for prompt in pair.prompts]
    ways = {method.name: functools.partial(decode, method) for method in methods}
    texts, seconds = timed(f"temperature {temperature:g}", ways, requests, options.rounds)
    emitted = {name: sum(out.stats.num_tokens for out in texts[name]) for name in ways}
    speed = speeds(emitted, seconds, PLAIN)
    plain = [out.tokens for out in texts[PLAIN]]
    for method in methods:
        name, mine = method.name, texts[method.name]
        calls = sum(out.stats.num_target_calls for out in mine)
        taus = [out.stats.num_tokens / out.stats.num_target_calls for out in mine]
        # Rules that test drafts have their own random numbers.
        comparable = method.follows_target or (temperature == 0 and method.target is None)
        identical = all(map(np.array_equal, plain, [out.tokens for out in mine]))
        accepted = sum(out.stats.accepted_per_depth for out in mine)
        rows.append(
            {
                "method": name,
                "temperature": temperature,
                "nodes": method.num_nodes,
                "seconds_by_prompt": np.median(seconds[name], axis=0).tolist(),
                "tau": emitted[name] / calls,
                "tau_by_prompt": taus,
                "accepted_per_depth": [round(float(count) / calls, 4) for count in accepted],
                "identical": identical if comparable else None,
            }
            | speed[name]
        )
    return rows


def different(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Methods whose tokens should be those of autoregressive decoding, and are not."""
    return [
        f"{row['method']}, temperature {row['temperature']:g}"
        for row in rows
        if row["identical"] is False
    ]


def method_tables(title: str, rows: Sequence[Mapping[str, Any]], **columns: str) -> list[Table]:
    """A table of methods for each temperature; `columns` are formats of additional ones."""
    return [
        Table(
            f"{title}, temperature {temperature:g}",
            [row for row in rows if row["temperature"] == temperature],
            {"method": "{method}", **columns, "nodes": "{nodes}"}
            | SPEED
            | {"tau": "{tau:.2f}", "identical": "{identical}"},
        )
        for temperature in dict.fromkeys(row["temperature"] for row in rows)
    ]


def found(pair: Pair, methods: Sequence[Method], options: Any) -> Found:
    """All findings of an experiment that compares methods at the temperatures of its options."""
    rows = [row for t in options.temperatures for row in compare(pair, methods, t, options)]
    tables = method_tables(f"{pair.name}, {options.prompts} prompts", rows)
    return Found(pair.settings() | {"decoding": rows}, tables, wrong=different(rows))
