"""Every request gives what `generate` gives for it alone, whatever shares the rows with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.testing import perturbed, tiny_model
from tests.decoding.texts import broken_at
from tests.extensions.heads import parts
from tests.helpers import COMPILED, refusal, with_weight
from tests.methods import SAMPLED
from tests.serving.requests import (
    TREE,
    WAYS,
    alone,
    drafting,
    mixed,
    ragged,
    served,
    serves_beside_failures,
)
from tests.serving.soak import soak


@pytest.mark.slow
def test_random_requests_of_all_kinds():
    found = soak(tiny_model(), requests=300, seed=0, samples=5)
    assert {"length", "end_token", "stop", "cancelled"} <= found.reasons.keys()
    assert found.compared > 2
    assert found.cache.hits > 20


def test_one_request_is_generate():
    """Tokens and statistics, by key, or by the data of a key, and with the config's end tokens."""
    model, key = tiny_model(), jax.random.key(3)
    options = dict(max_new_tokens=9, temperature=0.8, top_k=6)
    want = st.generate(model, [[3, 1, 4]], **drafting(model), **options, key=key[None])
    scheduler = st.Scheduler(model, rows=2, max_length=20, **drafting(model))
    keys = (key, key[None], jax.random.key_data(key))
    for completion in served(scheduler, [st.Request([3, 1, 4], **options, key=k) for k in keys]):
        assert completion.tokens == want.tokens[0, : want.lengths[0]].tolist()
        for field in dataclasses.fields(want.stats):
            got, expected = (getattr(s, field.name) for s in (completion.stats, want.stats))
            np.testing.assert_array_equal(got, expected)
        assert completion.seconds_decoded > 0 <= completion.seconds_queued


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("medusa", "eagle3", "dflash")),
        "mtp",
    ],
)
def test_heads_on_hidden_states(kind):
    """A new tenant of a row drafts from its own text's states."""
    model, drafter = parts(kind).target, parts(kind).drafter()
    requests = mixed(ragged(6), WAYS[:2])
    cache = dict(prefill_tokens=16, prefix_every=16, prefix_cache_bytes=2**20)
    scheduler = st.Scheduler(model, rows=2, max_length=60, quantum=3, drafter=drafter, **cache)
    want, accepted = alone(model, requests), []
    for _ in range(2):
        done = served(scheduler, requests)
        assert [completion.tokens for completion in done] == want
        accepted.append([completion.stats.num_accepted for completion in done])
    assert scheduler.prefix_cache_stats.tokens_reused > 0
    assert sum(accepted[0]) > 0
    assert accepted[0] == accepted[1]


@pytest.mark.slow
def test_a_verifier_that_tests_drafts_gives_the_text_of_the_request_alone():
    """Its random numbers belong to the row's own steps."""
    model = tiny_model()
    drafter = st.ModelDrafter(perturbed(model, 0.3), child_sampling="without_replacement")
    options = dict(drafter=drafter, topology=TREE, verifier="without_replacement")
    requests = ragged(5, temperature=1.0)
    scheduler = st.Scheduler(model, rows=2, max_length=60, quantum=3, **options)
    done = served(scheduler, requests)
    assert [completion.tokens for completion in done] == alone(model, requests, **options)


def test_a_failed_request_ends_alone():
    """Prompt lookup drafts the token that fails for rows that have it only."""
    options = dict(rows=2, max_length=60, quantum=2, drafter=st.NgramDrafter(), topology=TREE)
    broken = broken_at(35, model=tiny_model())
    serves_beside_failures(st.Scheduler(broken, **options), tiny_model())


@pytest.mark.thorough
def test_prefixes_of_others_are_refused_when_they_are_submitted():
    """Nothing is decoded from them, and no other request is lost."""
    model = tiny_model("mamba2attn hybrid")  # and one of which a number is another
    other = with_weight(model, "embedding", lambda rows: rows.at[0, 0].add(1e-3))
    draft, other_draft = (st.ModelDrafter(each) for each in (model, other))
    sizes = dict(rows=1, max_length=20)
    own, *others = (
        st.Scheduler(of, drafter=drafter, topology=TREE, **sizes)
        for of, drafter in ((model, draft), (other, draft), (model, other_draft))
    )
    larger = st.Scheduler(model, rows=1, max_length=99, drafter=draft, topology=TREE)
    others.append(st.Scheduler(model, **sizes))
    stem = own.read([3, 1, 4])
    request = st.Request([1], after=stem, max_new_tokens=3)
    for what, pool in zip(("model", "drafter", "drafter"), others, strict=True):
        for call in (lambda: pool.submit(request), lambda: pool.read([1], stem)):  # noqa: B023
            refusal(f"read with another {what}, or its weights", call)
        assert pool.num_waiting == 0
    whole = st.generate(model, [[3, 1, 4]], max_new_tokens=2, return_prefix=True).prefix
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), stem)
    too_large = "after has larger buffers than this pool, of max_length = 20, or several rows"
    for after, message in (
        (whole, "after was read with another drafter"),
        (rows, too_large),
        (larger.read([3, 1, 4]), too_large),
    ):
        refusal(message, own.submit, dataclasses.replace(request, after=after))


def test_new_weights_forget_what_the_old_ones_have_read():
    """No text has parts of both models: requests with a row end first, and others come after.

    Where weights change in place, those with a row are refused.
    """
    models = [nnx.clone(tiny_model()), *(perturbed(tiny_model(), 0.3, seed) for seed in (0, 1))]
    drafters = [st.ModelDrafter(perturbed(model, 0.1)) for model in models]
    sizes = dict(rows=1, max_length=64, prefix_cache_bytes=1 << 20, quantum=1)
    scheduler = st.Scheduler(models[0], drafter=drafters[0], topology=TREE, **sizes)
    request = st.Request([*range(20)] * 2, max_new_tokens=6, keep=True)
    texts = [alone(model, [request])[0] for model in models]
    assert served(scheduler, [request])[0].tokens == texts[0] != texts[1] != texts[2]
    waits = dataclasses.replace(request, prompt=[], after=scheduler.read(request.prompt))
    want = dict(zip(map(scheduler.submit, (request, waits)), texts, strict=False))
    next(scheduler.events())
    compiled, update = len(COMPILED), scheduler.update
    for weights in ((models[1], st.NgramDrafter()), (tiny_model("bamba hybrid"),)):
        refusal("the new model or drafter has other settings or arrays", update, *weights)
    update(models[1], drafters[1])
    assert scheduler.num_waiting == 1
    assert scheduler.prefix_cache_stats == st.PrefixCacheStats()
    refusal("after was read with another model, or its weights have", scheduler.submit, waits)
    assert {done.request_id: done.tokens for done in scheduler.completions()} == want
    assert len(COMPILED) == compiled

    update(models[0])
    assert [event.request_id for event in scheduler.events()][-1] == 2
    scheduler.submit(request)
    next(scheduler.events())
    nnx.update(models[0], nnx.state(models[2]))
    for call in (lambda: next(scheduler.events()), lambda: update(models[1])):
        refusal(r"weights .* have changed, and requests \[3\] have", call)
    scheduler.cancel(3)
    assert scheduler.pop(3).prefix is None
    assert served(scheduler, [request])[0].tokens == texts[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows=0), "rows must be an integer, at least 1"),
        (dict(max_length=1), "max_length must be an integer, from 2 to"),
        (dict(topology=TREE), "needs a drafter"),
        (dict(topology="auto"), "topology = 'auto' needs a drafter"),
        (dict(verifier="typical"), "'typical' is lossy, and a Scheduler"),
        (dict(prefill_tokens=0), "prefill_tokens must be an integer, at least 1"),
        (dict(prefix_every=0), "prefix_every must be an integer, at least 1"),
        (dict(rows=2**31), "rows = 2147483648: a batch has at most 65536 rows"),
        (dict(quantum=2**31), "quantum must be an integer, from 1 to 2147483647; got 2147483648"),
        (dict(prefix_cache_bytes=-1), "prefix_cache_bytes must be an integer, at least 0"),
        # Requests: the last one is refused, and waits for nothing.
        (dict(request=dict(prompt=[1] * 30, max_new_tokens=11)), "in all 41, and the limit is 40"),
        (dict(request=dict(max_new_tokens=11, max_length=12)), "in all 13, and the limit is 12"),
        (
            dict(before=dict(filters=[st.TopK(2)]), request=dict(filters=[st.TopP(0.9)])),
            "requests that wait or run have .*use another scheduler",
        ),
        (dict(drafter="iid", topology=TREE, before=SAMPLED, request={}), "needs temperature > 0"),
        (dict(verifier="greedy", before={}, request=SAMPLED), "exact at temperature 0 only"),
        (dict(request=[1, 2]), r"must be a Request, got \[1, 2\]; submit\(st.Request\(\[1, 2, 3\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(options, message):
    options = dict(model=tiny_model(), rows=2, max_length=40) | options
    if "drafter" in options:
        options["drafter"] = st.ModelDrafter(tiny_model(), child_sampling=options["drafter"])
    before, request = options.pop("before", None), options.pop("request", None)
    if request is None:
        refusal(message, st.Scheduler, **options)
        return
    common, scheduler = dict(prompt=[1, 2], max_new_tokens=5), st.Scheduler(**options)
    if before is not None:
        scheduler.submit(st.Request(**common | before))
    request = request if isinstance(request, list) else st.Request(**common | request)
    refusal(message, scheduler.submit, request)
    assert scheduler.num_waiting == (before is not None)
