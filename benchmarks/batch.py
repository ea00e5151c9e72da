"""At which batch size does speculation stop paying off?

Tokens per second of autoregressive decoding, a chain of 4 and the 13-node tree A, greedy, on
batches of 1 to 64 (8 on a CPU), interleaved. Acceptance means something with trained weights only.
With any weights, the time of a step relative to an autoregressive one is the acceptance length that
a method needs to break even at that batch size.

    python -m benchmarks.batch [--pair embedded|random] [--batches 1 2 4 8]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("batch", __doc__)
