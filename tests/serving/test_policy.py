"""Adaptive drafting: scripted speeds choose the scripted ways, and no choice changes a text."""

import itertools

import pytest

import stree_jax as st
from stree_jax.serving.policy import DraftPolicy
from stree_jax.testing import tiny_model
from tests.serving.requests import alone, drafting, ragged, served


def chosen(rates, runs):
    """The ways of so many runs, in which way w emits `rates[w](run)` tokens a second."""
    policy, ways = DraftPolicy(len(rates)), []
    for run in range(runs):
        way = policy.choose()
        tau = rates[way](run)
        # A step takes a second in every way, so tau is the rate.
        policy.record(way, tokens=int(100 * tau), calls=100, seconds=25.0, steps=25)
        ways.append(way)
    return ways


def constant(value):
    return lambda run: value


def test_each_way_is_measured_and_the_fastest_is_used():
    assert chosen([constant(1.0), constant(2.0), constant(1.5)], 5) == [0, 1, 2, 1, 1]


def test_a_little_faster_is_not_enough():
    ways = chosen([constant(1.0), constant(1.04)], 60)
    assert set(ways[2:5]) == {0}
    assert ways.count(1) < 8
    assert ways[-1] == 0


def test_ways_that_lost_are_tried_again_less_and_less_often():
    ways = chosen([constant(1.0), constant(0.5)], 500)
    tried = [run for run, way in enumerate(ways) if way == 1]
    assert [b - a for a, b in itertools.pairwise(tried)] == [5, 9, 17, 33, 65, 65, 65, 65, 65, 65]


def test_texts_that_change_change_the_way():
    ways = chosen([constant(1.0), lambda run: 0.5 if run < 40 else 4.0], 120)
    first = next(run for run in range(40, 120) if ways[run] == 1)
    assert ways[:40].count(1) <= 5
    # Averages need two runs to believe it: the one that tries, and the next.
    assert ways[first + 1 : first + 4] == [1, 1, 1]
    assert ways[first + 4] == 0  # which is now the one to be tried again
    assert ways[first + 5 :].count(0) < 8


def test_cost_counts_as_tokens_do():
    """More tokens a call, but steps that take longer."""
    policy = DraftPolicy(2)
    policy.record(0, tokens=100, calls=100, seconds=1.0, steps=100)
    policy.record(1, tokens=300, calls=100, seconds=4.0, steps=100)
    assert policy.choose() == 0
    policy = DraftPolicy(2)
    policy.record(0, tokens=100, calls=100, seconds=1.0, steps=100)
    policy.record(1, tokens=300, calls=100, seconds=2.0, steps=100)
    assert policy.choose() == 1
    policy.record(1, tokens=0, calls=0, seconds=1.0, steps=0)  # nothing ran
    assert policy.choose() == 1


@pytest.mark.slow
def test_switching_changes_no_text():
    """Every run in another way than the one before."""
    model = tiny_model()
    requests = ragged(9, temperature=1.0)
    scheduler = st.Scheduler(
        model, rows=3, max_length=60, quantum=3, adaptive=True, **drafting(model)
    )
    used = []

    class Scripted:
        def choose(self):
            return len(used) % 3

        def record(self, way, **measured):
            assert measured["steps"] > 0
            assert measured["calls"] > 0

    policy = Scripted()
    scheduler._policy = policy
    run = scheduler._run
    scheduler._run = lambda: (run(), used.append(scheduler._way))
    for completion, want in zip(served(scheduler, requests), alone(model, requests), strict=True):
        assert completion.tokens == want
    assert used[:4] == [0, 1, 2, 0]
