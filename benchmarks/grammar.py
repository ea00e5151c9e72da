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
import functools
import time
from collections.abc import Iterator

import numpy as np

import stree_jax as st
from benchmarks.common import Found, main, timed
from benchmarks.models import RANDOM_NOTE, default_dtype, random_model
from benchmarks.steps import Program, binary_tree
from stree_jax.extensions.grammar.tables import Compressor
from stree_jax.measuring.clock import summary
from stree_jax.measuring.report import Table

OPTIONS = {"--states": 10_000, "--vocabulary": 50_000, "--steps": 50, "--rounds": 7}

ALLOWED, EXCEPTIONS = 0.4, 100
FEW_STATES = 60
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
TREES = {"1 node": st.TreeTopology.chain(0), "tree of 15": binary_tree(15)}


def synthetic(num_states: int, vocab_size: int) -> st.Automaton:
    """An automaton with a random row for each state."""
    rng, tables = np.random.default_rng(0), Compressor(num_states, vocab_size)
    for state in range(num_states):
        tokens = np.flatnonzero(rng.random(vocab_size) < ALLOWED)
        following = np.full(len(tokens), (7 * state + 1) % num_states)
        elsewhere = rng.integers(0, len(tokens), EXCEPTIONS)
        following[elsewhere] = rng.integers(0, num_states, EXCEPTIONS)
        tables.add(state, tokens, following)
    return st.Automaton(tables.tables())


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Steps with the grammar and without, on one node and on a tree."""
    steps, size, rows, wrong = options.steps, options.vocabulary, [], []
    shape = st.from_pretrained(st.demo_path("target")).config
    model = random_model(dataclasses.replace(shape, vocab_size=size), default_dtype())
    began = time.perf_counter()
    grammar = synthetic(options.states, size)
    built = {"build_seconds": time.perf_counter() - began, "table_bytes": grammar.next_state.nbytes}
    few = synthetic(FEW_STATES, size)
    for name, tree in TREES.items():
        drafting = {"drafter": st.NgramDrafter(), "topology": tree, "max_steps": steps}
        length = (steps + 8) * (tree.depth + 1)
        compiled = functools.partial(Program, model, PROMPT, max_new_tokens=length, **drafting)
        ways = {"without": compiled(), "with": compiled(processors=(grammar,))}
        ends, seconds = timed(name, ways, [PROMPT], options.rounds)
        wrong += [f"{name} {way}" for way in ways if ends[way][0].statistics.target_calls != steps]
        counted = ways | {"with": compiled(processors=(few,))}
        moved = {way: program.bytes_of_step(PROMPT) for way, program in counted.items()}
        row = {"tree": name, "bytes": moved}
        row["milliseconds"] = {way: summary(1e3 * s / steps) for way, s in seconds.items()}
        row["added_percent"] = summary(100 * (seconds["with"] / seconds["without"] - 1))
        row["added_bytes_percent"] = 100 * (moved["with"] / moved["without"] - 1)
        rows.append(row)
    columns = {"tree": "{tree}"}
    for way in ("without", "with"):
        columns |= {f"{way}, ms a step": f"{{milliseconds[{way}][median]:.3g}}"}
        columns |= {f"{way}, bytes": f"{{bytes[{way}]:,}}"}
    columns |= {"ms added, %": "{added_percent[median]:.1f}"}
    columns |= {"bytes added, %": "{added_bytes_percent:.1f}"}
    yield Found(
        {"note": RANDOM_NOTE, "dtype": model.dtype.name, "rows": rows} | built,
        [Table(f"{options.states} states, {size} tokens", rows, columns)],
        wrong=wrong,
        line=built | {"added_percent": rows[-1]["added_percent"]["median"]},
    )


if __name__ == "__main__":
    main(run, OPTIONS)
