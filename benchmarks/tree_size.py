"""How does the time of a target call grow with the tree, and what does packing the tree save?

Full binary trees of 4, 5 and 6 levels (STree, figure 3): packed into one sequence; unrolled, each
root-to-leaf path a row of a batch; and the same rows one token at a time, by the recurrent step.
Then the time t(N) of packed trees with a linear and a quadratic fit, and how much longer the paths
accepted from N nodes must be than those from a chain of 5 nodes for the same speed (figure 2,
equations 7 and 8). A call does what a decode step does: replay, forward, best tokens. Weights are
random.

    python -m benchmarks.tree_size [--preset mamba2-2.7b] [--layers 8] [--dtype bfloat16]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("tree_size", __doc__)
