"""Do three models decode faster than two?

Chen, "An Exploration of Hierarchical Speculative Decoding": a target, a medium draft model q and a
small one s. Each alone, in turns in the paper's order and with the better model first, as cascades,
and prompt lookup in the place of s. The embedded draft is q; s is trained with

    stree-jax distill benchmarks/recipes/small-draft.toml stree_jax/demo/target DIR/small-draft

    python -m benchmarks.hierarchical [--small DIR/small-draft] [--prompts 6] [--tokens 96]
        [--rounds 3] [--temperatures 0 1] [--output DIR | --commit]
"""

import argparse
from collections.abc import Iterator

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.methods import CHAIN_OF_4, COMPARED, found
from benchmarks.models import embedded_pair
from stree_jax.measuring.methods import PLAIN, Method

OPTIONS = COMPARED | {"--prompts": 6, "--small": None}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Two draft models, q and s, and prompt lookup: alone, in turns and as cascades."""
    pair, lookup = embedded_pair(options.prompts), st.NgramDrafter()
    q = pair.draft
    ways = [
        Method(PLAIN),
        Method("q alone, chain of 4", st.ModelDrafter(q), CHAIN_OF_4),
        Method("prompt lookup alone", lookup, CHAIN_OF_4),
        Method("cascade of q and prompt lookup", st.CascadeDrafter(q, lookup, rounds=2)),
    ]
    if options.small is not None:
        small = st.from_pretrained(options.small)
        s = st.ModelDrafter(small)
        turns = {"ssq ssq (the paper's order)": "ssqssq", "qq ssss (the better first)": "qqssss"}
        ways += [
            Method("s alone, chain of 4", s, CHAIN_OF_4),
            *(Method(name, st.InterleavedDrafter(q, small, x)) for name, x in turns.items()),
            Method("cascade of q and s", st.CascadeDrafter(q, s, rounds=2)),
        ]
    yield found(pair, ways, options)


if __name__ == "__main__":
    main(run, OPTIONS)
