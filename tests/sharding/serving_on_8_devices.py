"""Schedulers on meshes of 8 CPU devices; run by `test_on_8_devices.py`."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import slots
from stree_jax.decoding.loop import SpeculativeDecoder
from stree_jax.decoding.placement import place_request
from stree_jax.decoding.plan import plan
from tests.decoding.rules import random_walk
from tests.helpers import COMPILED, with_weight
from tests.serving.requests import TREE, WAYS, alone, cut, in_families, mixed, ragged, served
from tests.sharding.configs import CONFIGS
from tests.sharding.meshes import assert_same, mesh_of, model_of, replicated_draft, sharded

slow = pytest.mark.slow
FAST = "one layer"


@functools.cache
def on(name, data, model):
    """The target on a mesh, and what drafts for it."""
    drafter = st.ModelDrafter(replicated_draft(name, data, model))
    return sharded(name, data, model), dict(drafter=drafter, topology=TREE)


def scheduler_of(name, data, model, rows=4, **options):
    target, drafts = on(name, data, model)
    common = dict(max_length=80, quantum=3)
    return st.Scheduler(target, rows=rows, **common | drafts | options)


def texts_of(done):
    assert all(completion.error is None for completion in done)
    return [completion.tokens for completion in done]


def test_requests_share_the_rows_of_a_mesh():
    """In any order, with prefixes, texts that go on, and one that is cancelled; no new programs."""
    requests = mixed(ragged(8), WAYS[:2])
    want = alone(model_of(FAST), requests)
    scheduler = scheduler_of(FAST, 2, 4)

    def round_of(order):
        some = [dataclasses.replace(requests[i], keep=i == 3) for i in order]
        done = served(scheduler, some)
        assert texts_of(done) == [want[i] for i in order]
        # Stems, and one of them goes on: its text is that of all that was read.
        prefix = done[order.index(3)].prefix
        stem = scheduler.read([4, 9])
        assert prefix.context.tokens.shape == stem.context.tokens.shape
        longer = scheduler.read([8, 1], after=prefix)
        text = dict(max_new_tokens=6, temperature=0.7, top_k=5, key=jax.random.key(7))
        cancelled = scheduler.submit(st.Request([3], max_new_tokens=60))
        after = [scheduler.submit(st.Request([], after=a, **text)) for a in (stem, prefix, longer)]
        assert next(scheduler.completions()).request_id in after
        scheduler.cancel(cancelled)
        done = {completion.request_id: completion for completion in scheduler.completions()}
        assert done[cancelled].finish_reason == "cancelled"
        texts = [[4, 9], [*requests[3].prompt, *want[3]]]
        texts.append([*texts[1], 8, 1])
        text["key"] = text["key"][None]
        for request_id, prompt in zip(after, texts, strict=True):
            if request_id in done:
                own = st.generate(model_of(FAST), [prompt], **text)
                assert done[request_id].tokens == own.tokens[0].tolist()

    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    round_of(order)
    count = len(COMPILED)
    served(scheduler, requests[:5])
    assert len(COMPILED) == count


def collectives(compiled):
    """What a program sends: results and names."""
    names = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return re.findall(rf"= (.+?) ({names})(?:-start)?\(", compiled.as_text())


def test_programs_leave_the_rows_where_they_are():
    """A row is inserted inside a shard and in place, and nothing gathers a pool's caches."""
    target, drafts = on(FAST, 2, 4)
    request = plan(target, [[1, 2, 3]] * 4, max_new_tokens=9, **drafts)
    decoder, drafter = request.decoder, drafts["drafter"]
    state = slots.empty(decoder, target, drafter, 4)
    one = jax.tree.map(lambda a: a[:1], request.context)
    prefix = decoder.read(target, drafter, target.partition.put_rows(one))
    assert target.partition.row_places([3, 0], 4).tolist() == [2, 0, 1, 2]
    places = target.partition.put(target.partition.row_places([3], 4))
    (key,) = target.partition.put_rows((jax.random.key(0)[None],))
    insert = slots.inserted.lower(decoder, target, state, places, prefix, key).compile()
    assert not collectives(insert)
    assert insert.as_text().count("may-alias") == len(jax.tree.leaves(state))
    request = place_request(request, target.partition)
    arguments = (target, drafter, state, request.limits, request.sampling, 4, 4)
    sent = collectives(SpeculativeDecoder.run.lower(decoder, *arguments).compile())
    gathered = [shape for shape, name in sent if name != "all-reduce"]
    assert len(gathered) == 1  # logits of the 2 rows of a shard
    assert gathered[0].startswith(f"f32[2,{TREE.num_nodes},{CONFIGS[FAST].vocab_size}]")


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"rows = 5: the mesh has data = 2, .*; use 4 or 6"):
        scheduler_of(FAST, 2, 4, rows=5)
    with pytest.raises(ValueError, match=r"rows = 3: the mesh has data = 8, .*; use 8"):
        scheduler_of(FAST, 8, 1, rows=3)
    scheduler = scheduler_of(FAST, 2, 4)
    other = st.Scheduler(model_of(FAST), rows=4, max_length=80)
    with pytest.raises(ValueError, match="another model"):
        scheduler.submit(st.Request([1], after=other.read([1, 2])))


@slow
@pytest.mark.parametrize("temperature", [0.0, 1.0, "mixed"])
@pytest.mark.parametrize(("data", "model"), [(2, 4), (8, 1)])
@pytest.mark.parametrize("name", ["mamba2", "bamba", "mamba2attn", "nemotron_h", "zamba2"])
def test_every_order_and_quantum(name, data, model, temperature):
    """As alone on one device, and as `generate` on the same mesh."""
    requests = mixed(ragged(20)) if temperature == "mixed" else ragged(20, temperature=temperature)
    want = alone(model_of(name), requests)
    target, _ = on(name, data, model)
    assert alone(target, requests) == want
    forwards = list(range(20))
    orders = forwards, forwards[::-1], np.random.default_rng(1).permutation(20).tolist()
    for quantum, order in zip((1, 7, 32), orders, strict=True):
        scheduler = scheduler_of(name, data, model, rows=8, quantum=quantum)
        done = served(scheduler, [requests[i] for i in order])
        assert texts_of(done) == [want[i] for i in order]


@slow
@pytest.mark.parametrize(("data", "model"), [(2, 4), (8, 1)])
def test_cancels_at_random(data, model):
    """Events, of which some cancel: texts are beginnings of what they would be."""
    name, rng = "bamba", np.random.default_rng(4)
    requests = mixed(ragged(24), WAYS[:2])
    want = alone(model_of(name), requests)
    scheduler = scheduler_of(name, data, model, rows=8)
    ids = [scheduler.submit(request) for request in requests]
    texts = {i: [] for i in ids}
    ended, cancelled = set(), set()
    for request_id, tokens, reason in scheduler.events():
        texts[request_id] += tokens
        if reason is not None:
            ended.add(request_id)
            assert scheduler.pop(request_id).tokens == texts[request_id]
        victim = int(rng.choice(ids))
        if rng.random() < 0.5 and victim not in ended | cancelled:
            try:
                scheduler.cancel(victim)
            except ValueError:  # it has ended, and its event comes
                continue
            cancelled.add(victim)
    assert len(cancelled) > 3
    for i, text in zip(ids, want, strict=True):
        assert texts[i] == (text[: len(texts[i])] if i in cancelled else text)


@slow
@pytest.mark.parametrize("drafts", ["model", "ngram", "beam"])
@pytest.mark.parametrize(("data", "model"), [(2, 4), (8, 1)])
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_the_prefix_cache(name, data, model, drafts):
    """In chunks, one text alone or several together, from entries of which few fit or all."""
    requests = in_families(mixed(ragged(18), WAYS[:2]))
    want = alone(model_of(name), requests)
    target, _ = on(name, data, model)
    draft = replicated_draft(name, data, model)
    drafter = dict(
        model=dict(drafter=st.ModelDrafter(draft), topology=TREE),
        ngram=dict(drafter=st.NgramDrafter()),
        beam=dict(drafter=st.BeamDrafter(draft), topology=st.TreeTopology.beam(2, 2)),
    )[drafts]
    options = dict(max_length=128, prefix_every=16, **drafter)
    for budget, tokens, quantum in ((10**8, 512, 7), (40_000, 64, 1), (10**8, None, 32)):
        cache = dict(prefix_cache_bytes=budget, prefill_tokens=tokens)
        scheduler = st.Scheduler(target, rows=8, quantum=quantum, **cache, **options)
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(18).tolist()
            done = served(scheduler, [requests[i] for i in order])
            assert texts_of(done) == [want[i] for i in order]
        stats = scheduler.prefix_cache_stats
        assert stats.nbytes <= budget
        assert stats.tokens_reused > 0
        assert (stats.evictions > 0) == (budget < 10**8)


@slow
@pytest.mark.parametrize(("name", "data", "model"), [("bamba", 2, 4), ("mamba2attn", 8, 1)])
def test_caches_that_grow(name, data, model):
    """Rows that run keep their texts, and their shards, when the caches of all get more room."""
    requests = mixed(ragged(12), WAYS[:2])
    for i, times in enumerate((20, 50)):
        key = jax.random.key(i)
        requests.append(st.Request([1, 2, 3] * times, max_new_tokens=60, key=key))
    options = dict(rows=8, max_length=300, first_places=64, prefix_cache_bytes=10**7)
    scheduler = scheduler_of(name, data, model, **options)
    done = served(scheduler, requests)
    assert texts_of(done) == alone(model_of(name), requests)
    assert scheduler._pool._size == 256


@slow
def test_entries_stay_where_they_are():
    """An entry is cut as the target is, and every shard of the batch has it."""
    target, drafts = on("bamba", 2, 4)
    scheduler = st.Scheduler(target, rows=4, max_length=128, prefix_cache_bytes=10**8, **drafts)
    entry = scheduler.read([*range(30)])
    for leaf in jax.tree.leaves(entry):
        assert len(leaf) == 1
        assert "data" not in leaf.sharding.spec
    whole = [leaf for leaf in jax.tree.leaves(entry.cache) if "model" in leaf.sharding.spec]
    assert len(whole) == 4  # state, conv window, keys and values


@slow
def test_options_of_requests():
    """Grammars, penalties, stops, filters and log-probabilities, some requests with each."""
    name = "mamba2"
    words = CONFIGS[name].vocab_size
    grammar = st.Automaton(np.asarray(random_walk(size=words).table))
    free = st.generate(model_of(name), [[5, 9]], max_new_tokens=12).tokens[0].tolist()
    ruled = dict(processors=[grammar, st.RepetitionPenalty(1.4)], min_new_tokens=3)
    common = dict(max_new_tokens=12, eos_token=[0, 1])
    requests = [
        st.Request([5, 9], stop=[free[4:6]], **common),
        st.Request([3], **common, **ruled),
        st.Request([4, 5, 6], temperature=0.9, key=jax.random.key(1), **common, **ruled),
        st.Request([7], temperature=0.8, key=jax.random.key(2), min_p=0.02, **common),
        st.Request([8, 2], log_probs=True, top_log_probs=2, **common),
        st.Request([9], temperature=1.1, key=jax.random.key(3), log_probs="sampled", **common),
    ]
    whole = st.Scheduler(model_of(name), rows=4, max_length=80, quantum=3)
    for (data, model), order in (((2, 4), requests), ((8, 1), requests[::-1])):
        want = served(whole, order)
        scheduler = scheduler_of(name, data, model, rows=8)
        for _ in range(2):
            for mine, expected in zip(served(scheduler, order), want, strict=True):
                assert_same(mine, expected)


@slow
def test_a_failed_request_ends_alone():
    """Of a shard of a shard: its row's next tenant is right, and so are the other rows."""
    name = "mamba2"
    requests = [
        r for r in ragged(14, vocab_size=35) if 35 not in cut(alone(model_of(name), [r])[0], r)
    ]
    broken = with_weight(model_of(name), "embedding", lambda weight: weight.at[35].set(jnp.nan))
    target = st.shard(broken, mesh_of(2, 4))
    bad = st.Request([4, 35, 2], max_new_tokens=9, keep=True)
    scheduler = st.Scheduler(target, rows=2, max_length=60, quantum=2, drafter=st.NgramDrafter())
    queue = [requests[0], bad, bad, *requests[1:5], bad, *requests[5:8]]
    for request, completion in zip(queue, served(scheduler, queue), strict=True):
        if request is bad:
            assert "the target model's logits are not finite in row" in completion.error
            assert completion.prefix is None
        else:
            assert completion.tokens == alone(model_of(name), [request])[0]
