"""How many tokens a second does the scheduler make of mixed requests, against batches?

Requests with prompts of 8 to 64 tokens and limits of 8 to 192 new tokens, at temperature 0: through
a `Scheduler`, and by `generate` on batches of as many rows in the order of arrival. A batch runs
until its longest request has ended, and counts what its requests asked for. The third way, batches
of requests sorted by their limits, is what a user can do who has all requests, and knows their
limits, beforehand. Rounds are interleaved, and every text is compared with that of the batches.

    python -m benchmarks.serving [--pair embedded|random] [--requests 64] [--rows 8]
        [--rounds 5] [--drafts]
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.progress import Progress

import stree_jax as st
from benchmarks.common import (
    conclude,
    interleaved,
    machine,
    print_table,
    progress_bar,
    read_options,
    save,
    summary,
)
from benchmarks.models import Pair, add_pair_options, chosen_pair

SCHEDULER, BATCHES, SORTED = "scheduler", "batches as they come", "batches sorted by limit"
PROMPT_LENGTHS, LIMITS = (8, 64), (8, 192)
QUANTUM = 32


def requests_of(pair: Pair, count: int, limits: tuple[int, int] = LIMITS) -> list[st.Request]:
    """Prompts cut to random lengths; limits are geometric, as lengths of answers are."""
    rng = np.random.default_rng(0)
    low, high = limits
    return [
        st.Request(
            pair.prompts[i][: int(rng.integers(*PROMPT_LENGTHS, endpoint=True))],
            max_new_tokens=int(np.clip(rng.geometric(3 / high), low, high)),
            eos_token=(),
        )
        for i in range(count)
    ]


def measure(
    pair: Pair,
    requests: list[st.Request],
    *,
    rows: int,
    rounds: int,
    drafts: bool,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Tokens per second of each way.

    Args:
        pair: target and draft.
        requests: in the order of arrival.
        rows: of the scheduler, and of a batch.
        rounds: timed runs of each way.
        drafts: decode with the pair's draft and a chain of 3.
        progress: a bar for it.
    """
    progress = progress or Progress(disable=True)
    drafting: dict[str, Any] = {}
    if drafts:
        drafting = dict(drafter=st.ModelDrafter(pair.draft), topology=st.TreeTopology.chain(3))
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    order = sorted(range(len(requests)), key=lambda i: requests[i].max_new_tokens)
    texts: dict[str, dict[int, list[int]]] = {}

    def schedule() -> None:
        scheduler = st.Scheduler(
            pair.target, rows=rows, max_length=longest, quantum=QUANTUM, **drafting
        )
        for request in requests:
            scheduler.submit(request)
        texts[SCHEDULER] = {done.request_id: done.tokens for done in scheduler.completions()}

    def batches(name: str, indices: list[int]) -> Callable[[], None]:
        def run() -> None:
            texts[name] = {}
            for first in range(0, len(indices), rows):
                batch = indices[first : first + rows]
                limits = [requests[i].max_new_tokens for i in batch]
                out = st.generate(
                    pair.target,
                    [requests[i].prompt for i in batch],
                    max_new_tokens=max(limits),
                    eos_token=(),
                    **drafting,
                )
                for i, row, limit in zip(batch, out.tokens, limits, strict=True):
                    texts[name][i] = row[:limit].tolist()

        return run

    ways = {
        SCHEDULER: schedule,
        BATCHES: batches(BATCHES, list(range(len(requests)))),
        SORTED: batches(SORTED, order),
    }
    task = progress.add_task("", total=len(ways) * (1 + rounds))
    for way in ways.values():  # compiles
        way()
        progress.advance(task)
    seconds = interleaved(ways, rounds, lambda: progress.advance(task))
    tokens = sum(request.max_new_tokens for request in requests)
    base = np.array(seconds[BATCHES])
    return [
        {
            "way": name,
            "tokens_per_second": summary((tokens / np.array(seconds[name])).tolist()),
            "speed_up": summary((base / np.array(seconds[name])).tolist()),
            "same_tokens": sum(texts[name][i] == texts[BATCHES][i] for i in range(len(requests))),
        }
        for name in ways
    ]


def main() -> None:
    """Measures, prints the table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_pair_options(parser)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", action="store_true", help="with the draft and a chain of 3")
    options = read_options(parser)
    pair = chosen_pair(options, options.requests)
    requests = requests_of(pair, options.requests)
    where = machine()
    with progress_bar() as progress:
        rows = measure(
            pair,
            requests,
            rows=options.rows,
            rounds=options.rounds,
            drafts=options.drafts,
            progress=progress,
        )
    count = len(requests)
    print_table(
        f"{pair.name}, {where['device']}: {count} requests, {options.rows} rows,"
        f" drafts {'on' if options.drafts else 'off'}",
        ("way", "tokens/s", "speed-up", "same texts"),
        [
            (
                row["way"],
                f"{row['tokens_per_second']['median']:,.0f}",
                f"{row['speed_up']['median']:.2f}x",
                f"{row['same_tokens']} of {count}",
            )
            for row in rows
        ],
    )
    results = pair.settings() | {
        "machine": where,
        "requests": count,
        "rows": options.rows,
        "rounds": options.rounds,
        "quantum": QUANTUM,
        "drafts": options.drafts,
        "new_tokens": sum(request.max_new_tokens for request in requests),
        "ways": rows,
    }
    path = save("serving", __doc__, results, options.output)
    same = all(row["same_tokens"] == count for row in rows)
    conclude(
        "serving",
        passed=same or pair.settings()["dtype"] != "float32",
        speed_up=round(rows[0]["speed_up"]["median"], 3),
        same_tokens=same,
        results=str(path),
    )


if __name__ == "__main__":
    main()
