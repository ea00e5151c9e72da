"""Do three models decode faster than two?

Chen, "An Exploration of Hierarchical Speculative Decoding": a target, a medium draft model q and a
small one s. Each alone, in turns in the paper's order and with the better model first, as cascades,
and prompt lookup in the place of s. The embedded draft is q; s is trained with

    stree-jax distill benchmarks/recipes/small-draft.toml stree_jax/demo/target DIR/small-draft

    python -m benchmarks.hierarchical [--small DIR/small-draft] [--prompts 6] [--tokens 96]
        [--rounds 3] [--temperatures 0 1] [--output DIR | --commit]
"""

from benchmarks.common import start

start(__name__, __doc__)
