"""Do Medusa heads draft better than a draft model or prompt lookup on this machine?

The target's hidden state predicts the next tokens; nothing else is run. All methods decode the same
prompts in turn, at temperature 0 and 1.

    python -m benchmarks.medusa [--heads DIR] [--mtp DIR] [--prompts 8] [--tokens 96] [--rounds 3]
        [--temperatures 0 1] [--output DIR | --commit]

The heads are those of the embedded target, or others that `stree-jax medusa` trained for it.
`--mtp` is a multi-token-prediction head for it, such as `stree-jax train-mtp` makes of
`benchmarks/recipes/mtp.toml`.
"""

from benchmarks.common import start

start(__name__, __doc__)
