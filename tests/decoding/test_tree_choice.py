"""`TreeChoice` with a simulated clock: plain NumPy, no model."""

import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.tree_choice import LONGEST, TRIAL

NONE, SHORT, DEFAULT, LONG = range(4)
COSTS = np.array([1.0, 1.4, 1.7, 1.9])
NEW = 128  # tokens of a text


class Clock:
    """Texts of rows whose best and second drafts are accepted at some rates, in simulated time."""

    def __init__(self, costs=COSTS, noise=0.05, beside=0.0, **options):
        self.choice, self.costs, self.noise = st.TreeChoice(**options), costs, noise
        self.beside = beside  # of each run, in steps
        self.draws = np.random.default_rng(0)

    def text(self, *rates, ready=None, ends=True, new=NEW):
        """The speed, relative to no drafts, and the steps with each tree, in their order."""
        left, seconds, runs = np.full(len(rates), new), 0.0, []
        self.choice.begin(len(rates))
        while (left > 0).any():
            number, most = self.choice.next(left > 0, left if ends else None, ready)
            tree, steps = self.choice.trees[number], 0
            counts = np.zeros((len(rates), tree.num_nodes), int)
            while steps < most and (left > 0).any():
                for row in np.flatnonzero(left > 0):
                    node = self.accepted(tree, rates[row])
                    counts[row, node] += 1
                    left[row] -= tree.depths[node] + 1
                steps += 1
            taken = steps * self.costs[number] * np.exp(self.noise * self.draws.normal())
            self.choice.beside = self.beside / 400
            self.choice.told(number, steps, taken / 400, counts)
            seconds += taken + self.beside
            runs.append((number, steps))
        return new / seconds, runs

    def accepted(self, tree, rate):
        """The last node of a path."""
        node = 0
        while True:
            draws = (
                self.draws.random(len(tree.children[node]))
                < [rate, *[0.2 * rate] * 3][: len(tree.children[node])]
            )
            if not draws.any():
                return node
            node = tree.children[node][draws.argmax()]


def steps_of(runs):
    return np.bincount(*np.transpose(runs), minlength=4)


@pytest.mark.parametrize(
    ("rate", "costs", "best"),
    [
        (0.9, [1, 1.4, 1.7, 1.9], LONG),
        (0.85, [1, 1.3, 1.5, 3.0], DEFAULT),
        (0.7, [1, 1.2, 2.4, 2.6], SHORT),
        (0.03, COSTS, NONE),
        (0.3, [1, 2, 3, 3], NONE),
    ],
)
def test_it_finds_the_fastest_tree(rate, costs, best):
    """Whatever the guesses were: the first texts lose something, and the later ones little."""
    clock = Clock(costs)
    speeds, runs = zip(*(clock.text(rate) for _ in range(24)), strict=True)
    assert runs[0][0][0] == DEFAULT
    steps = sum(steps_of(some) for some in runs[8:])
    assert steps.argmax() == best
    assert steps[best] > 0.8 * steps.sum()
    if best == NONE:
        assert np.mean(speeds[8:]) > 0.97


@pytest.mark.parametrize("rate", [0.9, 0.03])
def test_runs_are_long_where_they_take_long_beside_their_steps(rate):
    """A small model. And trials are rare."""
    clock, ideal = (Clock(noise=0.0, beside=8.0) for _ in range(2))
    ideal.choice.next = lambda *_: (LONG if rate == 0.9 else NONE, 1024)
    speeds, best = ([some.text(rate, new=512)[0] for _ in range(24)] for some in (clock, ideal))
    assert np.mean(speeds[8:]) > 0.96 * np.mean(best)


def test_trials_come_less_and_less_often_and_find_out_that_drafts_pay_again():
    clock = Clock()
    runs = [run for _ in range(40) for run in clock.text(0.03)[1]]
    at = np.cumsum([steps for _, steps in runs])[[number > 0 for number, _ in runs]]
    pauses = np.diff(at[1:])
    assert pauses[-1] > 2 * pauses[0]
    assert pauses.max() <= LONGEST + TRIAL[0]
    speeds = [clock.text(0.95)[0] for _ in range(16)]
    assert speeds[-1] > 1.5


def test_a_tree_whose_program_is_not_there_is_not_taken():
    clock, ready = Clock(), np.array([False, False, True, False])
    *_, runs = clock.text(0.03, ready=ready)
    assert {number for number, _ in runs} == {DEFAULT}
    active = np.ones(1, bool)
    assert clock.choice.wanted(active, None, ready) == NONE
    assert clock.choice.wanted(active, None, np.array([True, False, True, False])) is None
    good = Clock()
    good.text(1.0, ready=ready)
    assert good.choice.wanted(active, None, ready) == NONE
    ready[NONE] = True
    assert good.choice.wanted(active, None, ready) == LONG
    failed = np.array([True, True, True, False])
    assert good.choice.wanted(active, None, ready, failed) == LONG
    doubtful = Clock(noise=0.0)
    doubtful.text(0.5, ready=np.array([False, False, True, False]))
    assert doubtful.choice.wanted(active, None, ready) is None  # it was not timed beside none


def test_a_batch_ends_with_its_last_row_and_a_pool_does_not():
    """The first row has all drafts accepted, the second none."""
    batch, pool = Clock(), Clock()
    for _ in range(12):
        *_, of_batch = batch.text(1.0, 0.0)
        *_, of_pool = pool.text(1.0, 0.0, ends=False)
    # Until the first row ends no drafts pay for the batch either.
    assert steps_of(of_batch)[NONE] > 0.8 * steps_of(of_batch).sum()
    assert of_pool[0][0] > NONE
    active, left = np.array([True, True]), np.array([NEW, 4])
    values = batch.choice.values(active, left)
    assert values[1:].max() > values[0]


def test_a_row_that_begins_knows_what_rows_before_did():
    clock = Clock()
    clock.text(1.0, 0.0)
    mean = clock.choice.expected().mean(axis=0)
    clock.choice.begin(2, [1])
    good, new = clock.choice.expected()
    assert (good[1:] > new[1:]).all()
    assert (new[1:] > 1.2).all()
    assert np.isclose(new, mean, rtol=0.3).all()


def test_one_wrong_time_does_no_harm():
    """Other work on the machine: a run took ten times as long, or a tenth."""
    for factor in (10.0, 0.1):
        clock = Clock(noise=0.0)
        for _ in range(6):
            clock.text(0.03)
        last = clock.choice._last
        clock.choice._last = (last[0], factor * last[1])
        speeds = [clock.text(0.03)[0] for _ in range(12)]
        assert np.mean(speeds) > 0.97
