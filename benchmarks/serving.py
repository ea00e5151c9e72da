"""How many tokens a second does the scheduler make of mixed requests, against batches?

Requests with prompts of 8 to 64 tokens and limits of 8 to 192 new tokens, at temperature 0: through
a `Scheduler`, and by `generate` on batches of as many rows in the order of arrival. A batch runs
until its longest request has ended, and counts what its requests asked for. The third way, batches
of requests sorted by their limits, is what a user can do who has all requests, and knows their
limits, beforehand. Rounds are interleaved, and every text is compared with that of the batches.

    python -m benchmarks.serving [--pair embedded|random] [--requests 64] [--rows 8]
        [--rounds 5] [--drafts]
"""

from benchmarks.experiments import main

if __name__ == "__main__":
    main("serving", __doc__)
