"""Prompts in chunks and from the prefix cache: the texts are those of each request alone."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.testing import perturbed, tiny_model
from tests.helpers import heads_of, mtp_head_of
from tests.serving.requests import (
    TREE,
    WAYS,
    alone,
    cut,
    drafting,
    in_families,
    mixed,
    ragged,
    served,
)

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


def check(scheduler, order, name="plain"):
    requests, texts = cases(name)
    for i, done in zip(order, served(scheduler, [requests[i] for i in order]), strict=True):
        assert done.tokens == texts[i]
        assert done.error is None
    stats = scheduler.prefix_cache_stats
    total = sum(len(requests[i].prompt) for i in order)
    assert stats.tokens_reused + stats.tokens_prefilled == total
    return stats


def orders(count=18):
    return [np.random.default_rng(seed).permutation(count).tolist() for seed in range(2)]


def test_what_requests_share_is_read_once():
    """In any order, again and again, also if those that share a beginning come together."""
    scheduler = pool()
    first = check(scheduler, orders()[0])
    assert first.lookups == 18
    assert first.hits >= 9
    assert first.tokens_reused > 250
    assert first.evictions == first.damaged == 0
    assert 0 < first.nbytes <= 10**8
    again = scheduler.prefix_cache_stats.tokens_prefilled
    requests, texts = cases()
    for i, done in enumerate(served(scheduler, requests)):
        assert done.tokens == texts[i]
    stats = scheduler.prefix_cache_stats
    assert stats.tokens_prefilled == again  # all prompts were known
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
    stats = check(scheduler, orders()[0])
    assert stats.nbytes <= options["prefix_cache_bytes"]
    assert (stats.evictions > 5) == (options["prefix_cache_bytes"] > 1)
    if options["prefix_cache_bytes"] < 2:
        assert stats.tokens_reused == stats.hits == stats.num_entries == 0


def test_damage_costs_time_and_no_text():
    """Every entry gets a number that is not finite, while requests run that began with it."""
    scheduler = pool(prefill_tokens=64)
    requests, texts = cases()
    ids, done = {}, {}
    order = orders()[1] * 2
    for i in order:
        ids[scheduler.submit(requests[i])] = i
    rng = np.random.default_rng(0)
    for completion in scheduler.completions():
        done[completion.request_id] = completion
        damage(scheduler, rng)
    assert sorted(done) == sorted(ids)
    for request_id, completion in done.items():
        assert completion.error is None
        assert completion.tokens == texts[ids[request_id]]
    assert scheduler.prefix_cache_stats.damaged > 3


def damage(scheduler, rng):
    """Writes NaN or infinity into an array of every second entry."""
    entries = scheduler._reader._cache._entries
    for key, prefix in [*entries.items()][::2]:
        leaves, structure = jax.tree.flatten(prefix)
        numbers = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32 and leaf.size]
        at = rng.choice(numbers)
        place = rng.integers(leaves[at].size)
        value = rng.choice([np.nan, np.inf])
        leaves[at] = leaves[at].ravel().at[place].set(value).reshape(leaves[at].shape)
        entries[key] = jax.tree.unflatten(structure, leaves)


def test_texts_that_go_on_and_reading_use_the_cache():
    """`read`, `after`, `keep`, and a prompt that repeats a kept completion."""
    scheduler = pool()
    model, stats = scheduler.model, lambda: scheduler.prefix_cache_stats
    stem, common = list(range(30)), dict(max_new_tokens=6, temperature=1.0, key=5)
    prefix = scheduler.read(stem)
    assert stats().tokens_prefilled == 30
    scheduler.read(stem)
    assert (stats().tokens_prefilled, stats().tokens_reused) == (30, 30)
    options = dict(processors=[st.RepetitionPenalty(1.3)], log_probs=True, keep=True)
    (first,) = served(scheduler, [st.Request([7], after=prefix, **common, **options)])
    want = st.generate(
        *(model, [[*stem, 7]]),
        **{name: value for name, value in options.items() if name != "keep"},
        **common | dict(key=[5]),
    )
    assert first.tokens == want.tokens[0].tolist()
    np.testing.assert_allclose(first.log_probs, want.log_probs[0], atol=1e-4)
    assert stats().tokens_prefilled == 31
    text = [*stem, 7, *first.tokens]
    turns = [st.Request([*text, 9], **common), st.Request([], after=first.prefix, **common)]
    got = served(scheduler, turns)
    for whole, done in zip(([*text, 9], text), got, strict=True):
        assert done.tokens == alone(model, [st.Request(whole, **common)])[0]
    assert stats().tokens_prefilled == 32
    assert stats().damaged == 0


DRAFTERS = {
    "medusa": lambda model: st.MedusaDrafter(model, heads_of(model, amount=0.05)),
    "mtp": lambda model: st.MtpDrafter(model, mtp_head_of(model)),
    "cascade": lambda model: st.CascadeDrafter(perturbed(model, 0.1), st.NgramDrafter()),
    "dynamic": lambda model: st.DynamicDrafter(perturbed(model, 0.1), expand=2),
}


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("medusa", None),
        *(
            pytest.param(kind, places, marks=pytest.mark.slow)
            for kind in DRAFTERS
            for places in (None, 32)
            if places or kind != "medusa"
        ),
    ],
)
def test_other_drafters(kind, places):
    """Those on the target's states, and those whose states are of other kinds; caches may grow."""
    name = "mamba2attn hybrid" if places else "plain"
    drafter = DRAFTERS[kind](tiny_model(name))
    topology = st.TreeTopology.budget(6, 3) if kind == "dynamic" else TREE
    scheduler = pool(
        name,
        drafter=drafter,
        topology=None if kind == "cascade" else topology,
        prefill_tokens=20,
        first_places=places,
    )
    assert check(scheduler, orders()[0], name).tokens_reused > 200


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


def test_caches_grow_with_what_requests_need():
    """While rows decode and a prompt is read; older prefixes serve, and larger ones do not."""
    name, key = "mamba2attn hybrid", jax.random.key(0)
    scheduler = pool(name, first_places=64, prefill_tokens=16, quantum=2)
    prompt = [i % 37 for i in range(50)]
    requests = [
        st.Request(text, max_new_tokens=most, key=key, keep=True)
        for text, most in (([3], 30), (prompt, 9), ([*prompt, 5, 6], 40), (prompt[::-1], 60))
    ]
    want = alone(tiny_model(name), requests)
    ids, done = [scheduler.submit(requests[0])], {}
    events = scheduler.events()
    assert next(events).tokens
    small = scheduler.nbytes
    ids.append(scheduler.submit(requests[1]))
    assert next(events).request_id == ids[0]
    assert scheduler.nbytes == small
    ids += [scheduler.submit(request) for request in requests[2:]]
    assert next(events).request_id == ids[0]
    assert scheduler.nbytes > 1.2 * small
    assert len([*events]) > 4
    done = {completion.request_id: completion for completion in scheduler.completions()}
    assert [done[i].tokens for i in ids] == want
    longer = [
        dataclasses.replace(request, prompt=[], after=done[i].prefix, max_new_tokens=3)
        for request, i in zip(requests, ids, strict=True)
    ]
    whole = [
        dataclasses.replace(more, prompt=[*request.prompt, *text], after=None)
        for request, more, text in zip(requests, longer, want, strict=True)
    ]
    got = served(scheduler, longer)
    assert [completion.tokens for completion in got] == alone(tiny_model(name), whole)

    other = st.Scheduler(tiny_model(name), rows=1, max_length=60, **drafting(tiny_model(name)))
    with pytest.raises(ValueError, match="after has larger buffers than this pool, of max_length"):
        other.submit(longer[-1])


@pytest.mark.parametrize("options", [{}, dict(prefill_tokens=16)], ids=["whole", "in chunks"])
def test_any_number_of_first_places(options):
    """Buffers have few sizes, whatever was asked for: texts are longer and shorter than it."""
    name, key = "mamba2attn hybrid", jax.random.key(0)
    text = [i * i % 37 for i in range(90)]
    sizes = ((1, 3), (20, 9), (40, 30), (64, 2), (90, 30))
    requests = [st.Request(text[:size], max_new_tokens=most, key=key) for size, most in sizes]
    want = alone(tiny_model(name), requests)
    for places in (1, 32, 33, 63, 65, 97):
        done = served(pool(name, first_places=places, **options), requests)
        assert [completion.tokens for completion in done] == want, places


def test_mamba_layers_have_no_places():
    models = [tiny_model(), tiny_model("mamba2attn hybrid")]
    sizes = [
        [st.Scheduler(model, rows=1, max_length=200, first_places=n)._pool._size for n in (9, 999)]
        for model in models
    ]
    assert sizes == [[256, 256], [64, 256]]


def test_what_is_off_leaves_no_trace():
    """Without a prefix cache nothing is kept, and the loop's state is the same with one."""
    states = []
    for size in (0, 10**8):
        scheduler = pool(prefix_cache_bytes=size)
        served(scheduler, [st.Request([1, 2], max_new_tokens=2)])
        states.append(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), scheduler._pool._state))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prefill_tokens=0), "prefill_tokens must be an integer, at least 1"),
        (dict(prefix_every=0), "prefix_every must be an integer, at least 1"),
        (dict(first_places=0), "first_places must be an integer, at least 1"),
        (dict(rows=2**31), "rows = 2147483648: a batch has at most 65536 rows"),
        (dict(quantum=2**31), "quantum must be an integer, from 1 to 2147483647; got 2147483648"),
        (dict(prefix_cache_bytes=-1), "prefix_cache_bytes must be an integer, at least 0"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        st.Scheduler(tiny_model(), **dict(rows=1, max_length=20) | options)


@pytest.mark.slow
def test_ten_thousand_requests():
    """Memory is that of the budget, and no array is left behind."""
    count, budget = 10_000, 200_000
    rng = np.random.default_rng(0)
    model, key = tiny_model(), jax.random.key(0)
    stems = [rng.integers(0, 37, size=size).tolist() for size in rng.integers(1, 40, size=30)]
    scheduler = pool(rows=8, prefix_cache_bytes=budget)
    checked, live = {}, []
    for given in range(count):
        while scheduler.num_waiting < 20:
            end = rng.integers(0, 37, size=rng.integers(1, 20)).tolist()
            request = st.Request(
                [*stems[rng.integers(len(stems))], *end],
                max_new_tokens=int(rng.integers(1, 5)),
                keep=bool(rng.random() < 0.1),
                key=key,
            )
            request_id = scheduler.submit(request)
            if request_id % 400 == 0:
                checked[request_id] = request
        done = next(scheduler.completions())
        assert done.error is None
        assert scheduler.prefix_cache_stats.nbytes <= budget
        if done.request_id in checked:
            request = checked.pop(done.request_id)
            assert done.tokens == cut(alone(model, [request])[0], request)
        del done
        if given % 2_000 == 1_999:
            gc.collect()
            live.append(len(jax.live_arrays()))
    assert max(live[2:]) <= 1.1 * max(live[:2])
    stats = scheduler.prefix_cache_stats
    assert stats.evictions > 1_000
    assert stats.hits > count // 5


@pytest.mark.slow
@pytest.mark.parametrize("cache", [0, 150_000, 10**8])
@pytest.mark.parametrize("quantum", [1, 7, 32])
@pytest.mark.parametrize("name", ["mamba2attn hybrid", "bamba hybrid"])
def test_shuffled_orders_and_cancels(name, quantum, cache):
    """With cancels at random, and the iterator closed and made again."""
    requests, texts = cases(name)
    rng = np.random.default_rng(quantum)
    for order, chunk in zip(orders(), (11, 64), strict=True):
        scheduler = pool(
            *(name, quantum), prefill_tokens=chunk, prefix_cache_bytes=cache, topology=TREE
        )
        for i in order:
            scheduler.submit(requests[i])
        cancelled, done, iterator = set(), {}, scheduler.events()
        while scheduler.num_waiting + scheduler.num_running:
            event = next(iterator, None)
            if rng.random() < 0.2:
                iterator.close()
                iterator = scheduler.events()
            if event is not None and event.finish_reason:
                done[event.request_id] = scheduler.pop(event.request_id)
            alive = {*range(len(order))} - done.keys() - cancelled
            if rng.random() < 0.05 and alive and len(cancelled) < 5:
                chosen = int(rng.choice([*alive]))
                try:
                    scheduler.cancel(chosen)
                    cancelled.add(chosen)
                except ValueError:
                    pass  # it has ended, and nobody was told yet
            assert scheduler.prefix_cache_stats.nbytes <= cache
        done |= {each.request_id: each for each in scheduler.completions()}
        assert len(done) == len(order)
        for request_id, completion in done.items():
            text = texts[order[request_id]]
            assert completion.tokens == text[: len(completion.tokens)]
            assert completion.tokens == text or request_id in cancelled
