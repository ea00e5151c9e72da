"""Do Medusa heads draft better than a draft model or prompt lookup on this machine?

The target's hidden state predicts the next tokens; nothing else is run. All methods decode the same
prompts in turn, at temperature 0 and 1. (Commit 320bf86 also chooses a tree by the ranks of the
target's tokens among the candidates, and decodes with typical acceptance, which is LOSSY.)

    python -m benchmarks.medusa [--heads DIR] [--prompts 8] [--tokens 96] [--rounds 3]
        [--temperatures 0 1] [--output DIR | --commit]

The heads are those of the embedded target, or others that `stree-jax medusa` trained for it. Exit
code 1 if decoding gives other tokens than without drafts.
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("medusa", __doc__)
