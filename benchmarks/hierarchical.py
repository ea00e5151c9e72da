"""Do three models decode faster than two?

Chen, "An Exploration of Hierarchical Speculative Decoding": a target, a medium draft model q and a
small one s. Each alone, in turns in the paper's order and with the better model first, as cascades,
and prompt lookup in the place of s. The embedded draft is q; s is trained with

    stree-jax distill benchmarks/recipes/small-draft.toml stree_jax/demo/target DIR/small-draft

    python -m benchmarks.hierarchical [--small DIR/small-draft] [--prompts 6] [--tokens 96]
        [--rounds 3] [--temperatures 0 1] [--output DIR | --commit]

Exit code 1 if decoding gives other tokens than without drafts.
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("hierarchical", __doc__)
