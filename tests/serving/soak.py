"""Many random requests through one Scheduler, as a server has them, for hours if asked.

Prompts share beginnings, texts are continued, requests are cancelled, and the prefix cache has room
for few. No request may be lost, and a sample of the texts is compared with `generate` alone. Memory
is shown on the way: it must grow with compiled programs only.

    python -m tests.serving.soak [--requests 100000] [--seed 7] [--samples 1000] [--model NAME]
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import stree_jax as st
from stree_jax.decoding.programs import num_mappings
from stree_jax.testing import CONFIGS, tiny_model
from tests.serving.requests import WAYS, drafting

ROWS = 8
LENGTH = 96  # most tokens of a text
STATEMENT = Path("/proc/self/statm")  # Linux: numbers of pages
MEASURED = 50  # times that memory is looked at
RULES = (dict(), dict(processors=(st.RepetitionPenalty(1.3),), log_probs=True))


class Soaked(NamedTuple):
    """Counts by finish reason, of comparisons, of the cache, and memory over time."""

    reasons: collections.Counter[str]
    compared: int
    cache: st.PrefixCacheStats
    megabytes: list[int]
    seconds: float


def megabytes():
    return int(STATEMENT.read_text().split()[1]) * resource.getpagesize() // 10**6


def random_request(rng, vocab_size, stems, kept, number):
    """A request, which half of the time shares its beginning, and the text that it continues."""
    prompt = rng.integers(vocab_size, size=int(rng.integers(1, 20))).tolist()
    after, before = None, []
    kind = rng.random()
    if kind < 0.1 and kept:
        after, before = kept[int(rng.integers(len(kept)))]
        prompt = prompt[:4]
    elif kind < 0.6:
        stem = stems[int(rng.integers(len(stems)))]
        prompt = stem[: int(rng.integers(1, len(stem)))] + prompt
    most = min(int(rng.integers(1, 33)), LENGTH - len(before) - len(prompt))
    return st.Request(
        prompt,
        after=after,
        keep=bool(rng.random() < 0.05),
        max_new_tokens=most,
        eos_token=[(), 5, [7, 11]][int(rng.integers(3))],
        stop=[rng.integers(vocab_size, size=int(rng.integers(1, 3))).tolist()]
        if rng.random() < 0.3
        else (),
        **RULES[int(rng.random() < 0.2)],
        key=jax.random.key_data(jax.random.key(number)),
        **WAYS[int(rng.integers(len(WAYS)))],
    ), before


def soak(model, *, requests, seed, samples, tell=lambda line: None):
    """Asserts that no request is lost, and texts are those of `generate`."""
    rng, size = np.random.default_rng(seed), model.config.vocab_size
    stems = [rng.integers(size, size=40).tolist() for _ in range(9)]
    options = drafting(model)
    sizes = dict(rows=ROWS, max_length=LENGTH, quantum=8, prefill_tokens=64)
    caching = dict(prefix_cache_bytes=2**20, prefix_every=16)
    scheduler = st.Scheduler(model, **sizes, **caching, **options)
    kept, alive, pieces, cancelled = collections.deque(maxlen=8), {}, {}, set()
    reasons, compared, memory = collections.Counter(), 0, []
    began, submitted = time.monotonic(), 0
    chosen = {*rng.choice(requests, size=min(samples, requests), replace=False).tolist()}
    while submitted < requests or alive:
        if submitted < requests and scheduler.num_waiting < ROWS:
            for _ in range(min(int(rng.integers(1, ROWS)), requests - submitted)):
                request, before = random_request(rng, size, stems, kept, submitted)
                alive[scheduler.submit(request)] = request, before
                submitted += 1
                if submitted % max(1, requests // MEASURED) == 0:
                    memory.append(megabytes())
                    tell(
                        f"{submitted:,} requests in {time.monotonic() - began:,.0f} s:"
                        f" {memory[-1]} MB, {num_mappings():,} mappings, {compared} compared"
                    )
        if alive and rng.random() < 0.1:
            unlucky = int(rng.choice([*alive]))
            with contextlib.suppress(ValueError):  # it has ended, and nobody was told yet
                scheduler.cancel(unlucky)
                cancelled.add(unlucky)
        for event in itertools.islice(scheduler.events(), int(rng.integers(1, 20))):
            pieces.setdefault(event.request_id, []).extend(event.tokens)
            if event.finish_reason is None:
                continue
            (request, before), new = alive.pop(event.request_id), pieces.pop(event.request_id)
            done = scheduler.pop(event.request_id)
            assert (done.tokens, done.error) == (new, None)
            assert (done.finish_reason == "cancelled") == (event.request_id in cancelled)
            reasons[done.finish_reason] += 1
            text = [*before, *request.prompt, *done.tokens]
            if done.prefix and done.finish_reason == "length" and len(text) < LENGTH // 2:
                kept.append((done.prefix, text))
            if event.request_id in chosen and done.finish_reason != "cancelled":
                compare(model, request, before, done, options)
                compared += 1
    assert not [*scheduler.events(), *scheduler.completions()]
    assert reasons.total() == requests
    cache, seconds = scheduler.prefix_cache_stats, time.monotonic() - began
    return Soaked(reasons, compared, cache, memory, seconds)


def compare(model, request, before, done, options):
    """Asserts that a completion is what `generate` gives alone."""
    own = dataclasses.replace(request, prompt=[*before, *request.prompt], after=None)
    alone = st.generate(model, [own.prompt], options=[own], **options)
    assert done.tokens == alone.tokens[0, : alone.lengths[0]].tolist(), request
    assert done.finish_reason == alone.finish_reasons[0], request


def main():
    parser = argparse.ArgumentParser()
    for name, value in dict(requests=100_000, seed=7, samples=1_000).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", choices=[*CONFIGS], default="bamba hybrid")
    asked = vars(parser.parse_args())
    model = tiny_model(asked.pop("model"))
    found = soak(model, tell=lambda line: print(line, flush=True), **asked)  # noqa: T201
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
