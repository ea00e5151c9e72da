"""How much time and memory does packing the tree save in a whole generation (STree, table 1)?

Beam trees of M beams and N steps, greedy. The same drafts are verified packed, and unrolled into a
row per leaf; the tokens of both are checked against autoregressive decoding. The unrolled batch has
as many rows as the widest tree of the run has leaves, which an engine would not know in advance:
the comparison favours it. Memory is the temporary memory of the compiled loop, without weights and
caches.

    python -m benchmarks.packed [--pair embedded|random] [--beams 2 3 4 5] [--steps 4 8 16]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("packed", __doc__)
