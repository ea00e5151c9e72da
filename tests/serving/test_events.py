"""Events are the pieces of completions, whatever is cancelled and however they are asked for."""

import dataclasses
import functools
import gc
import signal

import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import slots
from stree_jax.models import identity
from stree_jax.testing import perturbed, tiny_model
from tests.helpers import CtrlC, refusal, word_tokenizer
from tests.serving.requests import (
    WAYS,
    Interrupted,
    alone,
    disturbed,
    drafting,
    mixed,
    orders_of,
    ragged,
    served,
)

thorough = pytest.mark.thorough

NEVER = [[1] * 9]  # a stop: with one in each pool all pools share their programs


@functools.cache
def pairs():
    """A tokenizer whose 37 tokens are two letters each."""
    pieces = [first + second for first in "abcdefg" for second in "hijklm"]
    return word_tokenizer(pieces[:37], "ah")


@functools.cache
def cases():
    """Requests, their texts without stops, and with them: of tokens, of letters, or none."""
    requests, texts, cut = mixed(ragged(12), WAYS[:2]), [], []
    for i, text in enumerate(alone(tiny_model(), requests)):
        at, stop, whole = len(text) // 2, NEVER, len(text)
        if len(text) > 4 and i % 3 == 1:
            stop = [text[at : at + 3], [1] * 4]
            whole = min(k for k in range(at + 1) if text[k : k + 3] == stop[0])
        if len(text) > 4 and i % 3 == 2:
            letters = pairs().decode(text)
            stop = [letters[2 * at - 1 : 2 * at + 4]]
            whole = letters.index(stop[0]) // 2
        requests[i] = dataclasses.replace(requests[i], stop=stop, tokenizer=pairs())
        texts.append(text)
        cut.append(text[:whole])
    assert sum(len(a) < len(b) for a, b in zip(cut, texts, strict=True)) > 3
    return requests, texts, cut


def pool(quantum, **options):
    model, sizes = tiny_model(), dict(rows=3, max_length=60, quantum=quantum)
    return st.Scheduler(model, **sizes, **drafting(model), **options)


def joined(events):
    """Tokens and reasons by request; nothing follows a request's end."""
    tokens, reasons = {}, {}
    for event in events:
        request_id, new, reason = event
        assert request_id not in reasons
        assert new or reason
        tokens.setdefault(request_id, []).extend(new)
        if reason is not None:
            reasons[request_id] = reason
    return tokens, reasons


def check_disturbed(scheduler, order, rng):
    requests, texts, cut = cases()
    events, done, cancelled = disturbed(scheduler, [requests[i] for i in order], rng)
    tokens, reasons = joined(events)
    assert sorted(reasons) == [*range(len(order))]
    assert cancelled
    for place, completion in done.items():
        i = order[place]
        assert completion.tokens == tokens[place]
        own = [event.text for event in events if event.request_id == place]
        assert completion.text == "".join(own)
        assert completion.finish_reason == reasons[place]
        assert completion.text == pairs().decode(completion.tokens) or i % 3 == 2
        if place in cancelled:
            assert completion.tokens == texts[i][: len(completion.tokens)]
        else:
            assert completion.tokens == cut[i]


@pytest.mark.parametrize("quantum", [pytest.param(1, marks=thorough), 32])
def test_events_are_the_pieces_of_completions(quantum):
    """Cancelled at random, in any order, with both iterators stopped and resumed at random."""
    for order in orders_of(12, seeds=(quantum, quantum + 1)):
        check_disturbed(pool(quantum), order, np.random.default_rng(quantum))


SERVING = r"(serving/\w+|decoding/(loop|results|text_stream|prefix/slots|prefix/prefix))"


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=thorough) for i in (1, 2))])
def test_a_scheduler_goes_on_after_ctrl_c_at_every_line(seed):
    """At the first visit of each line, or at later ones."""
    caching = dict(prefix_cache_bytes=20_000, prefix_every=8, prefill_tokens=8)
    visits, (order, _) = np.random.default_rng(seed), orders_of(12)
    ctrl_c = CtrlC(SERVING, lambda: visits.geometric(0.1) if seed else 1)
    scheduler = Interrupted(pool(3, **caching), ctrl_c)
    scheduler.read(cases()[0][0].prompt)
    scheduler.update(tiny_model())
    check_disturbed(scheduler, order, np.random.default_rng(0))
    assert len(ctrl_c.left) > 400


@pytest.mark.usefixtures("_ctrl_c_raises")
@pytest.mark.parametrize("donates", [(st.SpeculativeDecoder, "run"), (slots, "inserted")])
def test_ctrl_c_amid_a_call_that_donates_comes_when_its_state_is_kept(donates, monkeypatch):
    """A real signal, before the call's result is assigned."""
    (request, *_), _, (want, *_) = cases()
    call, scheduler = getattr(*donates), pool(3)

    def interrupted(*arguments):
        result = call(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(*donates, interrupted)
    scheduler.submit(request)
    with pytest.raises(KeyboardInterrupt):
        next(scheduler.completions())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert next(scheduler.completions()).tokens == want


def test_no_sum_of_weights_outlives_them():
    """Not after Ctrl-C: another array may get the place in memory that names a sum."""
    before = {*identity._known}
    ctrl_c = CtrlC("models/identity")
    ctrl_c.again(lambda: identity.identity(perturbed(tiny_model(), 0.1)))
    gc.collect()
    assert {*identity._known} <= before


@thorough
def test_a_cancelled_row_is_free_and_its_text_can_go_on():
    """What was cut off follows, in a row that another request had meanwhile."""
    requests, texts, _ = cases()
    longest = max(range(0, len(texts), 2), key=lambda i: len(texts[i]))  # temperature 0
    request, text = dataclasses.replace(requests[longest], stop=NEVER), texts[longest]
    scheduler = pool(quantum=1)
    first = scheduler.submit(dataclasses.replace(request, keep=True))
    others = [
        scheduler.submit(st.Request([i], max_new_tokens=20, stop=NEVER, eos_token=()))
        for i in range(3)
    ]
    events = scheduler.events()
    seen = []
    while len(seen) < 3:
        event = next(events)
        seen += event.tokens if event.request_id == first else []
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 1)
    scheduler.cancel(first)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    tokens, reasons = joined(events)
    assert reasons.pop(first) == "cancelled"
    assert {*reasons.values()} == {"length"}
    stopped = scheduler.pop(first)
    assert stopped.tokens == seen + tokens.get(first, []) == text[: len(stopped.tokens)]
    assert 0 < stopped.stats.num_tokens == len(stopped.tokens) < len(text)
    assert sorted(done.request_id for done in scheduler.completions()) == others
    (more,) = served(scheduler, [dataclasses.replace(request, prompt=[], after=stopped.prefix)])
    assert (stopped.tokens + more.tokens)[: len(text)] == text


@thorough
def test_who_asks_later_gets_what_is_left():
    """The events of completions that were not given yet, and the whole of what runs."""
    scheduler = pool(7)
    for i in range(3):
        scheduler.submit(st.Request([i], max_new_tokens=2 + 20 * (i == 2), stop=NEVER))
    given = next(scheduler.completions())
    tokens, reasons = joined(scheduler.events())
    assert given.request_id not in reasons
    left = {done.request_id: done.tokens for done in scheduler.completions()}
    assert left == tokens
    assert len(left) == 2


def test_a_request_is_cancelled_before_it_starts():
    """It has everything that it asked for, of no tokens."""
    scheduler = pool(1)
    options = dict(log_probs=True, top_log_probs=2, tokenizer=pairs())
    ids = [scheduler.submit(st.Request([1], max_new_tokens=5, **more)) for more in (options, {})]
    for request_id in ids:
        scheduler.cancel(request_id)
    assert scheduler.num_waiting == 0
    full, plain = scheduler.completions()
    assert (full.tokens, full.log_probs, full.top_log_probs, full.top_tokens) == ([], [], [], [])
    assert (full.text, plain.text, plain.log_probs) == ("", None, None)
    assert full.finish_reason == plain.finish_reason == "cancelled"
    assert full.stats.num_target_calls == 0 == full.seconds_decoded
    assert scheduler.nbytes == 0


def test_ids_that_are_refused():
    scheduler = pool(1)
    never, cancel = "request 0 has not ended, or its completion was given", scheduler.cancel

    def refuses(call, request_id, message):
        refusal(message, call, request_id)

    for call in (cancel, scheduler.pop):
        refuses(call, 0, "request_id = 0: 0 requests were submitted")
        refuses(call, -1, "request_id must be an integer, at least 0; got -1")
    waiting = scheduler.submit(st.Request([1], max_new_tokens=5))
    refuses(scheduler.pop, waiting, never)
    cancel(waiting)
    refuses(cancel, waiting, "request 0 has ended, and cannot be cancelled")
    assert scheduler.pop(waiting).request_id == waiting
    refuses(scheduler.pop, waiting, never)
