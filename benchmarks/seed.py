"""How fast are trees of thoughts built: serially, with drafts, with SEED's queue, as a batch?

"SEED: Accelerating Reasoning Tree Construction via Scheduled Speculative Decoding": breadth-first
search with a generator and an evaluator on GSM8K, Creative Writing and Blocksworld, at temperature
1. Ways, all with the same keys:

- autoregressive, speculative (a chain) and MCSD (a tree of the paper's sizes, whose drafts are
  sampled without replacement and tested): one branch after another;
- SEED's queue: all branches of a level draft at once, the target verifies one after another, first
  come, first served. SIMULATED from the steps that speculative decoding took and the measured times
  of drafting and verifying: one device cannot do both at once;
- batch: the branches of a level are rows; with refill: rows work on any of the problems.

Speed is tokens a second relative to the autoregressive way, rounds interleaved. MCSD's rule tests
drafts, so its texts are others of the same distribution; all other ways must give the same
thoughts.

The models are too small for these tasks. Look at speed and equality, not at what is solved.

    python -m benchmarks.seed [--tasks gsm8k ...] [--problems 2] [--rounds 2] [--chain 4]
        [--rows 8] [--output DIR | --commit]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("seed", __doc__)
