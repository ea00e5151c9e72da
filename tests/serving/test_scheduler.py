"""Every request gives what `generate` gives for it alone, whatever shares the rows with it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.verifiers import LOSSY_VERIFIERS
from stree_jax.testing import perturbed, tiny_model
from tests.extensions.test_medusa import heads_of
from tests.helpers import with_weight

TREE = st.TreeTopology.from_branching((2, 1))


def ragged(count, seed=0, vocab_size=37, **common):
    """Requests with prompts, limits, keys and end tokens of their own."""
    rng = np.random.default_rng(seed)
    return [
        st.Request(
            rng.integers(0, vocab_size, size=int(rng.integers(1, 30))).tolist(),
            max_new_tokens=int(rng.integers(1, 26)),
            eos_token=[(), 5, [7, 11]][i % 3],
            key=jax.random.key(100 + i),
            **common,
        )
        for i in range(count)
    ]


WAYS = (
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.0),
)


def mixed(requests, ways=WAYS):
    """Every way of sampling in turn, greedy ones too."""
    return [dataclasses.replace(r, **ways[i % len(ways)]) for i, r in enumerate(requests)]


def alone(model, requests, **options):
    """Tokens of each request: all in one batch without drafts, whose rows do not see each other."""
    most = max(r.max_new_tokens for r in requests)
    texts = []
    for _, group in itertools.groupby(
        sorted(range(len(requests)), key=lambda i: (requests[i].temperature, requests[i].top_k)),
        key=lambda i: (requests[i].temperature, requests[i].top_k),
    ):
        rows = [requests[i] for i in group]
        out = st.generate(
            model,
            [r.prompt for r in rows],
            max_new_tokens=most,
            temperature=rows[0].temperature,
            top_k=rows[0].top_k,
            top_p=rows[0].top_p,
            eos_token=(),
            key=jnp.stack([r.key for r in rows]),
            **options,
        )
        texts += [(id(r), cut(row.tolist(), r)) for r, row in zip(rows, out.tokens, strict=True)]
    by_request = dict(texts)
    return [by_request[id(r)] for r in requests]


def cut(tokens, request):
    """Up to the request's own end."""
    tokens = tokens[: request.max_new_tokens]
    ends = np.isin(tokens, request.eos_token).nonzero()[0]
    return tokens[: ends[0] + 1] if len(ends) else tokens


def served(scheduler, requests):
    """Completions in the order of the requests."""
    ids = [scheduler.submit(request) for request in requests]
    done = {completion.request_id: completion for completion in scheduler.completions()}
    assert sorted(ids) == sorted(done)
    return [done[i] for i in ids]


def drafting(model):
    return dict(drafter=st.ModelDrafter(perturbed(model, 0.1)), topology=TREE)


def check(name, requests, quanta, orders, rows=4):
    model = tiny_model(name)
    want = alone(model, requests)
    assert len({len(text) for text in want}) > 3
    for quantum, order in itertools.product(quanta, orders):
        scheduler = st.Scheduler(
            model, rows=rows, max_length=60, quantum=quantum, **drafting(model)
        )
        got = served(scheduler, [requests[i] for i in order])
        for i, completion in zip(order, got, strict=True):
            assert completion.tokens == want[i], (name, quantum, i)
            assert completion.error is None


def orders_of(count):
    forwards = list(range(count))
    return forwards, forwards[::-1], np.random.default_rng(1).permutation(count).tolist()


def test_mixed_requests_in_any_row_and_order():
    requests = mixed(ragged(12), WAYS[:2])
    check("mamba2attn hybrid", requests, quanta=(7,), orders=orders_of(12)[1:], rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0, "mixed"])
@pytest.mark.parametrize(
    "name", ["plain", "bamba hybrid", "mamba2attn hybrid", "falcon_h1 hybrid", "granite_moe hybrid"]
)
def test_forty_requests_through_four_rows(name, temperature):
    requests = mixed(ragged(40)) if temperature == "mixed" else ragged(40, temperature=temperature)
    check(name, requests, quanta=(1, 7, 32), orders=orders_of(40))


def test_one_request_is_generate():
    """Tokens and statistics, by key, or by the data of a key, and with the config's end tokens."""
    model = tiny_model()
    request = st.Request([3, 1, 4], max_new_tokens=9, temperature=0.8, top_k=6)
    key = jax.random.key(3)
    options = dict(max_new_tokens=9, temperature=0.8, top_k=6, key=key[None])
    want = st.generate(model, [[3, 1, 4]], **drafting(model), **options)
    scheduler = st.Scheduler(model, rows=2, max_length=20, **drafting(model))
    keys = (key, key[None], jax.random.key_data(key))
    for completion in served(scheduler, [dataclasses.replace(request, key=k) for k in keys]):
        assert completion.tokens == want.tokens[0, : want.lengths[0]].tolist()
        for field in dataclasses.fields(want.stats):
            got, expected = (getattr(s, field.name) for s in (completion.stats, want.stats))
            np.testing.assert_array_equal(got, expected)
        assert completion.seconds_decoded > 0 <= completion.seconds_queued


def test_medusa_heads():
    """A new tenant of a row drafts nothing until its own hidden state is known."""
    model = tiny_model()
    requests = mixed(ragged(6), WAYS[:2])
    drafter = st.MedusaDrafter(model, heads_of(model, amount=0.05))
    scheduler = st.Scheduler(model, rows=2, max_length=60, quantum=3, drafter=drafter)
    done = served(scheduler, requests)
    assert [completion.tokens for completion in done] == alone(model, requests)
    assert sum(completion.stats.num_accepted for completion in done) > 0


@pytest.mark.slow
def test_a_verifier_that_tests_drafts_gives_the_text_of_the_request_alone():
    """Its random numbers belong to the row's own steps."""
    model = tiny_model()
    drafter = st.ModelDrafter(perturbed(model, 0.3), child_sampling="without_replacement")
    options = dict(drafter=drafter, topology=TREE, verifier="without_replacement")
    requests = ragged(5, temperature=1.0)
    scheduler = st.Scheduler(model, rows=2, max_length=60, quantum=3, **options)
    for request, completion in zip(requests, served(scheduler, requests), strict=True):
        fields = ("max_new_tokens", "temperature", "eos_token")
        out = st.generate(
            model,
            [request.prompt],
            key=request.key[None],
            **options,
            **{name: getattr(request, name) for name in fields},
        )
        assert completion.tokens == out.tokens[0, : out.lengths[0]].tolist()


def test_a_failed_request_ends_alone():
    """Its row's next tenant is right, and so is who shares the pool with it."""
    model = tiny_model()
    # Token 35 gives NaN wherever it is read. Prompt lookup drafts it for rows that have it only.
    broken = with_weight(model, "embedding", lambda weight: weight.at[35].set(jnp.nan))
    requests = [r for r in ragged(14, vocab_size=35) if 35 not in cut(alone(model, [r])[0], r)]
    bad = st.Request([4, 35, 2], max_new_tokens=9, keep=True)
    scheduler = st.Scheduler(
        broken, rows=2, max_length=60, quantum=2, drafter=st.NgramDrafter(), topology=TREE
    )
    queue = [requests[0], bad, bad, *requests[1:5], bad, *requests[5:8]]
    for request, completion in zip(queue, served(scheduler, queue), strict=True):
        if request is bad:
            assert "the target model's logits are not finite in row" in completion.error
            assert completion.tokens == []
            assert completion.prefix is None
        else:
            assert completion.error is None
            assert completion.tokens == alone(model, [request])[0]


def test_texts_go_on_from_what_was_read():
    """Forks of a prefix; a kept completion, with and without more; while other rows decode."""
    model = tiny_model("mamba2attn hybrid")
    scheduler = st.Scheduler(model, rows=3, max_length=60, quantum=4, **drafting(model))
    common = dict(max_new_tokens=6, temperature=1.0)
    stem, key = [9, 8, 7, 6, 5], jax.random.split(jax.random.key(1), 8)
    prefix = scheduler.read(stem)
    forks = [st.Request([], after=prefix, key=key[i], keep=True, **common) for i in range(4)]
    forks.append(st.Request([1, 2], after=prefix, key=key[4], **common))
    forks.append(st.Request([3], key=key[5], **common))
    got = served(scheduler, forks)
    texts = [[*stem]] * 4 + [[*stem, 1, 2], [3]]
    for text, completion, k in zip(texts, got, key, strict=False):
        assert completion.tokens == alone(model, [st.Request(text, key=k, **common)])[0]
    branch = got[2]
    longer = [
        st.Request([4, 4], after=branch.prefix, key=key[6], **common),
        st.Request([], after=branch.prefix, key=key[7], **common),
    ]
    text = [*stem, *branch.tokens]
    for more, completion, k in zip(([4, 4], []), served(scheduler, longer), key[6:], strict=True):
        assert completion.tokens == alone(model, [st.Request([*text, *more], key=k, **common)])[0]


def test_requests_may_come_while_others_are_served():
    model = tiny_model()
    scheduler = st.Scheduler(model, rows=2, max_length=40)
    for prompt in ([1], [2], [3]):
        scheduler.submit(st.Request(prompt, max_new_tokens=5))
    assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
    seen = []
    for completion in scheduler.completions():
        seen.append(completion.request_id)
        if len(seen) == 1:
            scheduler.submit(st.Request([4], max_new_tokens=5))
            break  # what has ended meanwhile is not lost
    seen += [completion.request_id for completion in scheduler.completions()]
    assert sorted(seen) == [0, 1, 2, 3]
    assert seen[:2] == [0, 1]  # first come, first served
    assert not list(scheduler.completions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows=0), "rows must be an integer, at least 1"),
        (dict(max_length=1), "max_length must be an integer, from 2 to"),
        (dict(quantum=0), "quantum must be an integer"),
        (dict(topology=TREE), "needs a drafter"),
        (dict(verifier="best"), "unknown verifier 'best'"),
        (dict(adaptive=True), "there is no drafter"),
        (dict(verifier="typical"), "'typical' is lossy, and a Scheduler"),
        (dict(verifier=LOSSY_VERIFIERS["typical"]), "is lossy, and a Scheduler"),
    ],
)
def test_bad_schedulers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        st.Scheduler(**dict(model=tiny_model(), rows=2, max_length=40) | options)


def test_drafters_of_one_tree_are_not_adaptive():
    drafter = st.InterleavedDrafter(tiny_model(), tiny_model(seed=1), "qs")
    with pytest.raises(ValueError, match="InterleavedDrafter fills its own only"):
        st.Scheduler(tiny_model(), rows=2, max_length=40, drafter=drafter, adaptive=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt=[1] * 30, max_new_tokens=11), "in all 41, and the limit is 40"),
        (dict(prompt=[]), "is empty"),
        (dict(prompt=[99]), "token id 99, outside the vocabulary"),
        (dict(temperature=1.0), "needs a random key"),
        (dict(temperature=1.0, key=jnp.zeros(7)), "key must be a random key"),
        (dict(temperature=1.0, key=jax.random.split(jax.random.key(0))), "an array of shape"),
        (dict(top_p=2.0), "top_p must be in"),
        (dict(eos_token=-1), "eos_token must be"),
    ],
)
def test_bad_requests_are_refused_at_once(options, message):
    scheduler = st.Scheduler(tiny_model(), rows=2, max_length=40)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(st.Request(**dict(prompt=[1, 2], max_new_tokens=5) | options))
    assert scheduler.num_waiting == 0


def test_what_cannot_share_rows_is_refused():
    model = tiny_model()
    drafter = st.ModelDrafter(model, child_sampling="iid")
    scheduler = st.Scheduler(model, rows=2, max_length=40, drafter=drafter, topology=TREE)
    sampled = st.Request([1], max_new_tokens=3, temperature=1.0, key=jax.random.key(0))
    scheduler.submit(sampled)
    with pytest.raises(ValueError, match="needs temperature > 0"):
        scheduler.submit(st.Request([1], max_new_tokens=3))
    scheduler = st.Scheduler(model, rows=2, max_length=40, verifier="greedy")
    scheduler.submit(st.Request([1], max_new_tokens=3))
    with pytest.raises(ValueError, match="exact at temperature 0 only"):
        scheduler.submit(sampled)
