"""Prompts in chunks and from the prefix cache: the texts are those of each request alone."""

import jax
import pytest

import stree_jax as st
from stree_jax.testing import tiny_model
from tests.helpers import refusal
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


def pool(quantum=7, rows=5, **options):
    model = tiny_model()
    options = dict(prefix_cache_bytes=10**8, prefix_every=16) | options
    return st.Scheduler(
        model, rows=rows, max_length=LENGTH, quantum=quantum, **drafting(model), **options
    )


def test_what_requests_share_is_read_once():
    """In any order, again and again, also if those that share a beginning come together."""
    scheduler, requests = pool(), in_families(mixed(ragged(18), WAYS[:2]))
    texts = alone(tiny_model(), requests)
    stats = []
    for order in orders_of(18):
        done = served(scheduler, [requests[i] for i in order])
        assert [one.tokens for one in done] == [texts[i] for i in order]
        stats.append(scheduler.prefix_cache_stats)
    first, last = stats
    assert first.tokens_reused + first.tokens_prefilled == sum(len(r.prompt) for r in requests)
    assert first.lookups == 18
    assert first.hits >= 9
    assert first.tokens_reused > 250
    assert 0 < first.nbytes <= 10**8
    assert last.tokens_prefilled == first.tokens_prefilled  # all prompts were known
    assert last.hits == first.hits + 18


def test_a_token_is_read_once():
    """From positions that were named too, whose sizes are shown."""
    scheduler = pool(rows=3, prefix_every=None)
    stem = list(range(30))
    prefix = scheduler.read(stem, keep=[10, 20])
    scheduler.read([*stem[:20], 7, 7])
    for more in ([], [], [1, 2]):
        scheduler.submit(st.Request(more, after=prefix, keep=True, max_new_tokens=6))
    branch, *_ = scheduler.completions()
    text = [*stem, *branch.tokens]
    assert [len(done.tokens) for done in served(scheduler, [st.Request([*text, 4])])] == [64]
    stats = scheduler.prefix_cache_stats
    assert stats.tokens_prefilled == 30 + 2 + 2 + 1
    sizes = dict(stats.sizes)
    assert {10, 20, 30, 36} <= {*sizes}
    assert 0 < sizes[20] < prefix.nbytes
    for keep in ([0], [31], 5):
        refusal("keep must be ", scheduler.read, stem, keep=keep)
    refusal("from 30 to 31; got 3", scheduler.read, [1], prefix, keep=[3])
    refusal("needs a prefix cache", pool(prefix_cache_bytes=0).read, stem, keep=[3])


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
