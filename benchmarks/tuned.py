"""Is the tuned tree the fastest one, and what do dynamic trees add?

First the tuned tree against no drafts, chains of 1 to 8 and the paper's trees A to E. Then dynamic
trees with a fitted sharpness against the best static tree and a beam tree of as many nodes and
levels. Prompts are decoded one at a time, all methods interleaved; what is tuned is tuned on other
prompts. All methods must give the same tokens with the same key.

Which tree is best depends on the text as well as on the machine, so the spread is over prompts,
drawn anew 2,000 times with replacement. A method is faster than the tuned tree if it is so in 95 %
of the draws.

    python -m benchmarks.tuned [--prompts 12] [--tokens 96] [--rounds 3] [--nodes 6 13 32]
        [--shipped]                                 the tree that ships with the embedded pair
        [--output DIR | --commit]                   default: benchmark-results; benchmarks/results
        [--target DIR --draft DIR --name NAME]      instead of the embedded pair
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("tuned", __doc__)
