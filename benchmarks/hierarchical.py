"""Do three models decode faster than two?

Chen, "An Exploration of Hierarchical Speculative Decoding": a target p, a medium model q and a
small one s; n drafts of s and one of q, m times. The paper has no experiment. Tables:

1. tokens a target call by theorem 3.2 and measured, for m and n from 1 to 4, and with the better
   model first;
2. speed of no draft, each model alone, the paper's order, the better model first, a cascade, and
   prompt lookup below a cascade.

The medium model is the embedded draft. The small one is trained with

    stree-jax distill benchmarks/recipes/small-draft.toml stree_jax/demo/target DIR/small-draft

    python -m benchmarks.hierarchical [--small DIR/small-draft] [--prompts 6] [--tokens 96]
        [--rounds 3] [--most 4] [--temperatures 0 1] [--output DIR | --commit]

Without --small there is no first table, and prompt lookup is the only small model of the second.
Exit code 1 if decoding gives other tokens than without drafts. Commit 63d9880 has a simulation of
the theorem, and an enumeration of the paper's algorithm 2 as printed and corrected.
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("hierarchical", __doc__)
