"""Requests with different settings, and what each gives alone."""

import contextlib
import dataclasses
import itertools

import jax
import numpy as np

import stree_jax as st
from stree_jax.testing import perturbed

TREE = st.TreeTopology.from_branching((2, 1))


def ragged(count, vocab_size=37, **common):
    """Requests with different prompts, limits, keys and end tokens."""
    rng = np.random.default_rng(0)
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


def in_families(requests):
    """Two of three get a prompt that begins as those of their family do."""
    rng = np.random.default_rng(3)
    stems = [rng.integers(0, 37, size=size).tolist() for size in (50, 23)]
    return [
        dataclasses.replace(r, prompt=stems[i % 3 - 1] + r.prompt[: 1 + i // 6 * 5]) if i % 3 else r
        for i, r in enumerate(requests)
    ]


def alone(model, requests, **options):
    """Tokens of each request: all in one batch without drafts, whose rows do not see each other."""
    texts = [request.prompt for request in requests]
    out = st.generate(model, texts, options=requests, **options)
    return [row[:count].tolist() for row, count in zip(out.tokens, out.lengths, strict=True)]


def served(scheduler, requests):
    """Completions in the order of the requests."""
    ids = [scheduler.submit(request) for request in requests]
    done = {completion.request_id: completion for completion in scheduler.completions()}
    assert sorted(ids) == sorted(done)
    return [done[i] for i in ids]


def serves_beside_failures(scheduler, model):
    """Of a scheduler whose model is this one but for token 35, which gives NaN where it is read.

    The next request in the row of one that failed is right, and so are the others in the pool.
    """
    requests = [r for r in ragged(14, vocab_size=35) if 35 not in alone(model, [r])[0]]
    bad = st.Request([4, 35, 2], max_new_tokens=9, keep=True)
    queue = [requests[0], bad, bad, *requests[1:5], bad, *requests[5:8]]
    for request, completion in zip(queue, served(scheduler, queue), strict=True):
        if request is bad:
            assert "the target model's logits are not finite in row" in completion.error
            assert (completion.tokens, completion.prefix) == ([], None)
        else:
            assert completion.error is None
            assert completion.tokens == alone(model, [request])[0]
    last = scheduler.submit(bad)
    assert [*scheduler.events()] == [(last, [], "failed")]


def drafting(model):
    return dict(drafter=st.ModelDrafter(perturbed(model, 0.1)), topology=TREE)


class Interrupted:
    """A scheduler: each of its calls is interrupted at every line, and made again."""

    def __init__(self, scheduler, ctrl_c):
        self.scheduler, self.again = scheduler, ctrl_c.again

    def __getattr__(self, name):
        value = getattr(self.scheduler, name)
        return (lambda *values: self.again(lambda: value(*values))) if callable(value) else value

    def submit(self, request):
        before = self.num_waiting
        self.again(lambda: self.num_waiting > before or self.scheduler.submit(request))

    def cancel(self, number):
        before = self.num_waiting + self.num_running
        try:
            self.again(lambda: self.scheduler.cancel(number))
        except ValueError:  # it had ended, or the call before has cancelled it
            if self.num_waiting + self.num_running == before:
                raise

    def events(self):
        self.again(self.scheduler.events)  # they are kept from the first call on
        return self.taken(self.scheduler.events)

    def completions(self):
        return self.taken(self.scheduler.completions)

    def taken(self, iterate):
        while item := self.again(lambda: next(iterate(), None)):
            yield item


def orders_of(count, seeds=(0, 1)):
    return [np.random.default_rng(seed).permutation(count).tolist() for seed in seeds]


def disturbed(scheduler, requests, rng):
    """Serves requests, some of which are cancelled, with iterators stopped and resumed at random.

    Returns all events, the completions by the place of their request, and which were cancelled.
    """
    for request in requests:
        scheduler.submit(request)
    events, done, cancelled, listening = [], {}, set(), scheduler.events()
    while scheduler.num_waiting + scheduler.num_running:
        ended = {*done} | {event.request_id for event in events if event.finish_reason}
        way = rng.integers(4)
        if way == 0:
            done |= {each.request_id: each for each in itertools.islice(scheduler.completions(), 1)}
        else:
            events += itertools.islice(listening, 1)
        if way == 1:
            listening.close()
            listening = scheduler.events()
        last = events[-1].request_id if events and events[-1].finish_reason else None
        if last is not None and last not in ended and rng.random() < 0.3:
            done[last] = scheduler.pop(last)
        if rng.random() < 0.1 and (alive := {*range(len(requests))} - ended):
            chosen = int(rng.choice([*alive]))
            with contextlib.suppress(ValueError):  # it has ended, and nobody was told yet
                scheduler.cancel(chosen)
                cancelled.add(chosen)
    events += scheduler.events()
    done |= {each.request_id: each for each in scheduler.completions()}
    assert not [*scheduler.events(), *scheduler.completions()]
    assert sorted(done) == [*range(len(requests))]
    for place, completion in done.items():
        assert (completion.finish_reason == "cancelled") == (place in cancelled)
    return events, done, cancelled
