"""Do Medusa heads draft better than a draft model or prompt lookup on this machine?

The target's hidden state predicts the next tokens; nothing else is run. All methods decode the same
prompts in turn, at temperature 0 and 1.

    python -m benchmarks.medusa [--heads DIR] [--mtp DIR] [--prompts 8] [--tokens 96] [--rounds 3]
        [--temperatures 0 1] [--output DIR | --commit]

The heads are those of the embedded target, or others that `stree-jax medusa` trained for it.
`--mtp` is a multi-token-prediction head for it, such as `stree-jax train-mtp` makes of
`benchmarks/recipes/mtp.toml`.
"""

import argparse
from collections.abc import Iterator

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.methods import COMPARED, TWO_TREES, found, trees
from benchmarks.models import embedded_pair
from stree_jax.measuring.methods import LOOKUP, PLAIN, Method

OPTIONS = COMPARED | {"--prompts": 8, "--heads": None, "--mtp": None}


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Heads of two kinds, a draft model and prompt lookup."""
    pair = embedded_pair(options.prompts)
    heads = st.load_medusa(options.heads or st.demo_path("medusa"), pair.target)
    drafter, draft = st.MedusaDrafter(pair.target, heads), st.ModelDrafter(pair.draft)
    chain = st.TreeTopology.chain(heads.num_heads)
    ways = [
        Method(PLAIN),
        Method(f"Medusa, chain of {chain.depth}", drafter, chain),
        Method("Medusa, default tree", drafter),
        *trees(draft, TWO_TREES, "draft model, "),
        LOOKUP,
    ]
    if options.mtp is not None:
        own = st.MtpDrafter(pair.target, st.load_mtp(options.mtp, pair.target))
        few = {"chain of 2": st.TreeTopology.chain(2)} | TWO_TREES
        ways += trees(own, few, "multi-token prediction, ")
    yield found(pair, ways, options)


if __name__ == "__main__":
    main(run, OPTIONS)
