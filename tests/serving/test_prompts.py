"""Prompts in chunks and from the prefix cache: the texts are those of each request alone."""

import functools

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.testing import tiny_model
from tests.methods import drafts
from tests.serving.requests import (
    WAYS,
    alone,
    drafting,
    in_families,
    mixed,
    orders_of,
    ragged,
    served,
)

pytestmark = pytest.mark.thorough

LENGTH = 128


@functools.cache
def cases(name="plain"):
    """Requests in families of prompts that share a beginning, and their texts."""
    requests = in_families(mixed(ragged(18), WAYS[:2]))
    return requests, alone(tiny_model(name), requests)


def pool(name="plain", quantum=7, rows=5, **options):
    model = tiny_model(name)
    options = dict(prefix_cache_bytes=10**8, prefix_every=16) | options
    return st.Scheduler(
        model, rows=rows, max_length=LENGTH, quantum=quantum, **drafting(model) | options
    )


def check(scheduler, order, name="plain", *, exact=True):
    requests, texts = cases(name)
    for i, done in zip(order, served(scheduler, [requests[i] for i in order]), strict=True):
        assert done.tokens == texts[i]
        assert done.error is None
    stats = scheduler.prefix_cache_stats
    total = sum(len(requests[i].prompt) for i in order)
    assert not exact or stats.tokens_reused + stats.tokens_prefilled == total
    return stats


def test_what_requests_share_is_read_once():
    """In any order, again and again, also if those that share a beginning come together."""
    scheduler = pool()
    first = check(scheduler, orders_of(18)[0])
    assert first.lookups == 18
    assert first.hits >= 9
    assert first.tokens_reused > 250
    assert first.evictions == 0
    assert 0 < first.nbytes <= 10**8
    stats = check(scheduler, range(18), exact=False)
    assert stats.tokens_prefilled == first.tokens_prefilled  # all prompts were known
    assert stats.hits == first.hits + 18


@pytest.mark.parametrize(
    "options",
    [
        dict(prefill_tokens=5, prefix_cache_bytes=0),
        dict(prefill_tokens=None, prefix_cache_bytes=30_000, quantum=32),  # a few entries
        dict(prefill_tokens=9, prefix_cache_bytes=1, prefix_every=None, quantum=1),  # none fits
    ],
    ids=["no cache", "thrashing", "nothing fits"],
)
def test_small_chunks_and_small_budgets(options):
    scheduler = pool(**options)
    stats = check(scheduler, orders_of(18)[0])
    assert stats.nbytes <= options["prefix_cache_bytes"]
    assert (stats.evictions > 5) == (options["prefix_cache_bytes"] > 1)
    if options["prefix_cache_bytes"] < 2:
        assert stats.tokens_reused == stats.hits == stats.num_entries == 0


@pytest.mark.parametrize(
    "name",
    [
        *("mamba2attn hybrid", "qwen3_5 hybrid"),
        pytest.param("qwen3_next hybrid", marks=pytest.mark.slow),
    ],
)
def test_texts_go_on_from_what_was_read(name):
    """All use the cache: a token is prefilled once."""
    scheduler = pool(name, rows=3)
    stem, all_keys = list(range(30)), jax.random.split(jax.random.key(1), 7)
    keys = iter(all_keys)
    prefix = scheduler.read(stem)
    assert scheduler.prefix_cache_stats.tokens_prefilled == 30
    scheduler.read(stem)
    stats = scheduler.prefix_cache_stats
    assert (stats.tokens_prefilled, stats.tokens_reused) == (30, 30)
    rules = [st.RepetitionPenalty(1.3)]
    common = dict(max_new_tokens=6, temperature=1.0, processors=rules, log_probs=True)
    whole, found = [], []

    def goes_on(*turns):
        """Texts after prefixes of texts, with more tokens."""
        requests = [
            st.Request(more, after=after, key=key, keep=True, **common)
            for (after, _, more), key in zip(turns, keys, strict=False)
        ]
        whole.extend([*text, *more] for _, text, more in turns)
        found.extend(served(scheduler, requests))
        return found[-len(turns) :]

    forks = [(prefix, stem, more) for more in ([], [], [1, 2])]
    branch = goes_on(*forks, (None, [], [3]))[1]
    assert scheduler.prefix_cache_stats.tokens_prefilled == 33
    text = [*stem, *branch.tokens]
    goes_on((branch.prefix, text, [4, 4]), (branch.prefix, text, []))
    assert scheduler.prefix_cache_stats.tokens_prefilled == 35
    goes_on((None, [], [*text, 4, 4, 9]))
    assert scheduler.prefix_cache_stats.tokens_prefilled == 36
    # They are those of whole prompts.
    want = st.generate(scheduler.model, whole, key=all_keys, **common)
    assert [done.tokens for done in found] == want.tokens.tolist()
    for done, log_probs in zip(found, want.log_probs, strict=True):
        np.testing.assert_allclose(done.log_probs, log_probs, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("heads", "plain"),
        pytest.param("heads", "mamba2attn hybrid", marks=pytest.mark.slow),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind in ("mtp head", "turns", "dynamic")
            for name in ("plain", "mamba2attn hybrid")
        ),
    ],
)
def test_other_drafters(kind, name):
    """Those on the target's states, and those whose states are of other kinds."""
    model = tiny_model(name)
    scheduler = pool(name, prefill_tokens=20, **drafts(model, kind))
    assert check(scheduler, orders_of(18)[0], name).tokens_reused > 200


def test_rows_decode_while_a_long_prompt_is_read():
    """And the first of two texts that share a beginning may be cancelled: the other one reads."""
    scheduler = pool(prefill_tokens=8, quantum=2, prefix_every=None)
    prompt = [i % 37 for i in range(90)]
    key = jax.random.key(0)
    background = st.Request([3], max_new_tokens=60, key=key)
    short = scheduler.submit(background)
    events = scheduler.events()
    assert next(events).request_id == short
    long = [scheduler.submit(st.Request([*prompt, i], max_new_tokens=3)) for i in range(2)]
    chunks = sum(next(events).request_id == short for _ in range(4))
    assert chunks == 4
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 0)
    scheduler.cancel(long[0])
    texts = {short: [], long[0]: [], long[1]: []}
    for event in events:
        texts[event.request_id] += event.tokens
    done = {completion.request_id: completion for completion in scheduler.completions()}
    assert done[long[0]].finish_reason == "cancelled"
    second = st.Request([*prompt, 1], max_new_tokens=3, key=key)
    want = alone(tiny_model(), [second, background])
    assert [done[long[1]].tokens, done[short].tokens] == want


def test_what_a_pool_takes():
    """Mamba layers have no places; and a prefix cache changes nothing in the loop's state."""

    def nbytes(name, length, **options):
        scheduler = st.Scheduler(tiny_model(name), rows=1, max_length=length, **options)
        scheduler.submit(st.Request([1], max_new_tokens=9))
        next(scheduler.events())
        return scheduler.nbytes

    few, many = (nbytes("plain", length) for length in (60, 999))
    assert few == many == nbytes("plain", 60, prefix_cache_bytes=10**8)
    few, many = (nbytes("mamba2attn hybrid", length) for length in (60, 999))
    assert few < many
