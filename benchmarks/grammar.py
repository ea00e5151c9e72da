"""What does a grammar cost in a decode step?

A synthetic grammar of many states over a large vocabulary, each of which allows two fifths of the
tokens: most lead to one other state, a hundred elsewhere. The target has the layers of the
embedded one, random weights and that vocabulary; steps of one node and of a tree are timed with
the grammar and without it. Bytes are those that XLA counts for a compiled step, with a grammar of
few states: it counts a whole table for each look-up, and a step reads a row for each node.

    python -m benchmarks.grammar [--states 10000] [--vocabulary 50000] [--steps 50]
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import stree_jax as st
from benchmarks.common import Found, Table, start, summary, timed
from benchmarks.models import RANDOM_NOTE, default_dtype, random_model
from benchmarks.steps import binary_tree
from stree_jax.decoding.grammar.automaton import Row, tables_of
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.options import plan

ALLOWED, EXCEPTIONS = 0.4, 100
FEW_STATES = 60
TREES = {"1 node": st.TreeTopology.chain(0), "tree of 15": binary_tree(15)}


def synthetic(num_states: int, vocab_size: int) -> st.Automaton:
    """An automaton with a random row for each state."""
    rng = np.random.default_rng(0)

    def rows() -> Iterator[Row]:
        for state in range(num_states):
            tokens = np.flatnonzero(rng.random(vocab_size) < ALLOWED)
            following = np.full(len(tokens), (7 * state + 1) % num_states)
            elsewhere = rng.integers(0, len(tokens), EXCEPTIONS)
            following[elsewhere] = rng.integers(0, num_states, EXCEPTIONS)
            yield state, tokens, following

    return st.Automaton(tables_of(rows(), num_states, vocab_size))


class Steps:
    """A number of decode steps as one compiled program."""

    def __init__(
        self, model: st.HybridLM, topology: st.TreeTopology, count: int, processors: tuple[Any, ...]
    ):
        drafter = st.NgramDrafter() if topology.num_nodes > 1 else None
        self._model, self._count = model, count
        self._plan = plan(
            model,
            [[1, 2, 3, 1, 2, 3, 1, 2]],
            drafter=drafter,
            topology=topology,
            max_new_tokens=(count + 8) * (topology.depth + 1),
            processors=processors,
            eos_token=(),
        )
        self._run = SpeculativeDecoder.run.lower(*self._start(), max_steps=count).compile()

    def _start(self) -> tuple[Any, ...]:
        p = self._plan
        state = p.decoder.start(self._model, p.drafter, p.context, p.keys, p.sampling)
        return p.decoder, self._model, p.drafter, state, p.limits, p.sampling

    def __call__(self, _: None) -> int:
        """Runs all steps; the number of those that were taken."""
        state = self._run(*self._start()[1:], max_steps=self._count)
        return int(jax.block_until_ready(state).statistics.target_calls[0])

    def bytes(self) -> int:
        """Bytes of a step, by XLA's count."""
        compiled = SpeculativeDecoder.step.lower(*self._start()).compile()
        return int(compiled.cost_analysis()["bytes accessed"])


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Steps with the grammar and without, on one node and on a tree."""
    shape = st.from_pretrained(st.demo_path("target")).config
    model = random_model(dataclasses.replace(shape, vocab_size=options.vocabulary), default_dtype())
    began = time.perf_counter()
    automaton = synthetic(options.states, options.vocabulary)
    built = time.perf_counter() - began
    few = synthetic(FEW_STATES, options.vocabulary)
    rows, wrong = [], []
    for name, topology in TREES.items():
        ways = {
            "without": Steps(model, topology, options.steps, ()),
            "with": Steps(model, topology, options.steps, (automaton,)),
        }
        calls, seconds = timed(name, ways, [None], options.rounds)
        counted = {
            way: Steps(model, topology, options.steps, processors).bytes()
            for way, processors in (("without", ()), ("with", (few,)))
        }
        wrong += [f"{name} {way}" for way in ways if calls[way] != [options.steps]]
        milliseconds = {way: 1e3 * each[:, 0] / options.steps for way, each in seconds.items()}
        rows.append(
            {
                "tree": name,
                "milliseconds": {way: summary(each.tolist()) for way, each in milliseconds.items()},
                "added_percent": summary(
                    (100 * (milliseconds["with"] / milliseconds["without"] - 1)).tolist()
                ),
                "bytes": counted,
                "added_bytes_percent": 100 * (counted["with"] / counted["without"] - 1),
            }
        )
    sizes = {"build_seconds": built, "table_bytes": automaton.next_state.nbytes}
    columns = {"tree": "{tree}"}
    for way in ("without", "with"):
        columns |= {f"{way}, ms a step": f"{{milliseconds[{way}][median]:.3g}}"}
        columns |= {f"{way}, bytes": f"{{bytes[{way}]:,}}"}
    columns |= {"ms added, %": "{added_percent[median]:.1f}"}
    columns |= {"bytes added, %": "{added_bytes_percent:.1f}"}
    yield Found(
        {"note": RANDOM_NOTE, "dtype": model.dtype.name, "rows": rows} | sizes,
        [Table(f"{options.states} states, {options.vocabulary} tokens", rows, columns)],
        wrong=wrong,
        line=sizes | {"added_percent": rows[-1]["added_percent"]["median"]},
    )


start(__name__, __doc__)
