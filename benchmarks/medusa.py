"""Do Medusa heads draft better than a draft model or prompt lookup on this machine?

The target's hidden state predicts the next tokens; nothing else is run. Ranks of the target's own
tokens among the candidates of each head give the tau of every tree, and the tree with the largest
for its size. Then all methods decode the same prompts in turn, at temperature 0 and 1. Typical
acceptance, which is LOSSY, is decoded apart. (Commit 63d9880 enumerates its distance from the
target on four tokens.)

    python -m benchmarks.medusa [--heads DIR] [--prompts 8] [--tokens 96] [--rounds 3] [--nodes 13]
        [--temperatures 0 1] [--output DIR | --commit]

The heads are those of the embedded target, or others that `stree-jax medusa` trained for it. Exit
code 1 if decoding gives other tokens than without drafts.
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("medusa", __doc__)
