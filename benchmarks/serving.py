"""How many tokens a second does the scheduler make of mixed requests, against batches?

Requests with prompts of 8 to 64 tokens and limits of 8 to 192 new tokens, at temperature 0: through
a `Scheduler`, and by `generate` on batches of as many rows in the order of arrival. A batch runs
until its longest request has ended, and counts what its requests asked for. The third way, batches
of requests sorted by their limits, is possible if all requests are known beforehand, with their
limits. Rounds are interleaved, and every text is compared with that of the batches.

    python -m benchmarks.serving [--pair embedded|random] [--requests 64] [--rows 8]
        [--rounds 5]
"""

import argparse
import functools
from collections.abc import Iterator, Sequence

import numpy as np

import stree_jax as st
from benchmarks.common import SPEED, Found, Table, start, summary, timed
from benchmarks.models import Pair, chosen_pair

SCHEDULER, BATCHES, SORTED = "scheduler", "batches as they come", "batches sorted by limit"
LIMITS = (8, 192)  # new tokens of a request
QUANTUM = 32


def run(options: argparse.Namespace) -> Iterator[Found]:
    """A scheduler against batches in order of arrival, and batches sorted by limit."""
    pair = chosen_pair(options, options.requests)
    requests = requests_of(pair, options.requests)
    arrival, rows = range(len(requests)), options.rows
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)

    def schedule(_: None) -> list[list[int]]:
        scheduler = st.Scheduler(pair.target, rows=rows, max_length=longest, quantum=QUANTUM)
        for request in requests:
            scheduler.submit(request)
        texts = {done.request_id: done.tokens for done in scheduler.completions()}
        return [texts[i] for i in arrival]

    def batches(order: Sequence[int], _: None) -> list[list[int]]:
        texts = {}
        for first in range(0, len(order), rows):
            batch = [requests[i] for i in order[first : first + rows]]
            out = st.generate(
                pair.target,
                [request.prompt for request in batch],
                max_new_tokens=max(request.max_new_tokens for request in batch),
                eos_token=(),
            )
            for i, request, row in zip(order[first:], batch, out.tokens, strict=False):
                texts[i] = row[: request.max_new_tokens].tolist()
        return [texts[i] for i in arrival]

    by_limit = sorted(arrival, key=lambda i: requests[i].max_new_tokens)
    ways = {
        SCHEDULER: schedule,
        BATCHES: functools.partial(batches, arrival),
        SORTED: functools.partial(batches, by_limit),
    }
    texts, seconds = timed(f"{len(requests)} requests", ways, [None], options.rounds)
    tokens = sum(request.max_new_tokens for request in requests)
    found = [
        {
            "way": name,
            "tokens_per_second": summary((tokens / seconds[name][:, 0]).tolist()),
            "speed_up": summary((seconds[BATCHES] / seconds[name])[:, 0].tolist()),
            "same_tokens": sum(map(list.__eq__, texts[name][0], texts[BATCHES][0])),
        }
        for name in ways
    ]
    exact = pair.target.dtype == "float32"
    title = f"{pair.name}: {len(requests)} requests, {rows} rows"
    yield Found(
        pair.settings() | {"quantum": QUANTUM, "new_tokens": tokens, "ways": found},
        [Table(title, found, {"way": "{way}"} | SPEED | {"same texts": "{same_tokens}"})],
        wrong=[row["way"] for row in found if exact and row["same_tokens"] < len(requests)],
        line={"speed_up": found[0]["speed_up"]["median"]},
    )


def requests_of(pair: Pair, count: int) -> list[st.Request]:
    """Prompts cut to random lengths of 8 to 64; limits are geometric, as lengths of answers are."""
    rng, (low, high) = np.random.default_rng(0), LIMITS
    return [
        st.Request(
            pair.prompts[i][: int(rng.integers(8, 64, endpoint=True))],
            max_new_tokens=int(np.clip(rng.geometric(3 / high), low, high)),
            eos_token=(),
        )
        for i in range(count)
    ]


start(__name__, __doc__)
