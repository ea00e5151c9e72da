"""How does acceptance fall with temperature, and which sampling keeps it up (STree, figure 4)?

The embedded pair at temperatures from 0 to 1.3, on a chain of 4 and on tree A: children by noise
that the target shares; drafts tested by traversal verification, with i.i.d. children and multi-step
sampling (the paper's), and without replacement; the top children and target-only verification (the
paper's naive sampling); a beam tree with as many nodes. Ways that follow the target must give the
tokens of autoregressive decoding at every temperature, the others at 0.

    python -m benchmarks.temperature [--prompts 8] [--tokens 96] [--keys 3]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("temperature", __doc__)
