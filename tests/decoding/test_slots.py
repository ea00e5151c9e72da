"""Rows that begin and end while others continue: each gives what `generate` gives for it alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import slots
from stree_jax.decoding.plan import plan
from stree_jax.decoding.types import Limits
from stree_jax.testing import perturbed, tiny_model
from tests.helpers import COMPILED

ROWS, NEW_TOKENS = 4, 14
TREE = st.TreeTopology.from_branching((2, 1))
PROMPTS = [[5, 9, 2, 30, 11, 7, 7], [3], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
KEYS = jax.vmap(jax.random.key)(jnp.arange(10, 16))


def slow(name):
    return [pytest.param(name, marks=pytest.mark.slow)]


class Pool:
    """A pool of sampled rows, with the drafts of a model that often agrees."""

    def __init__(self, name="plain", topology=TREE, **options):
        self.model = tiny_model(name)
        self.drafter = st.ModelDrafter(perturbed(self.model, 0.1))
        self.options = dict(max_new_tokens=NEW_TOKENS, temperature=1.0) | options
        some = self.plan([[0]] * ROWS, topology=topology, max_new_tokens=50)
        self.decoder, self.sampling = some.decoder, some.sampling
        self.limits = Limits(jnp.full(ROWS, NEW_TOKENS), some.limits.eos_tokens)
        self.state = slots.empty(self.decoder, self.model, self.drafter, ROWS)

    def plan(self, prompts, **options):
        common = dict(drafter=self.drafter, key=jax.random.key(0))
        return plan(self.model, prompts, **self.options | common | options)

    def read(self, prompt, before=None):
        context = self.plan([prompt]).context
        return self.decoder.read(self.model, self.drafter, context, before)

    def insert(self, rows, prefix, keys):
        self.state = slots.insert(self.decoder, self.model, self.state, rows, prefix, keys)

    def run(self, max_steps=None, stop_after_ended=None):
        self.state = self.decoder.run(
            *(self.model, self.drafter, self.state, self.limits, self.sampling),
            max_steps,
            stop_after_ended,
        )

    def take(self, row):
        return slots.take(self.state, row)

    def new(self, row):
        end, count = int(self.state.context.length[row]), int(self.state.emitted[row])
        return self.state.context.tokens[row, end - count : end].tolist()

    def alone(self, prompt, key, **options):
        options = self.options | options
        return st.generate(self.model, [prompt], key=key[None], **options).tokens[0].tolist()


@pytest.mark.parametrize("name", ["plain", *slow("bamba hybrid")])
def test_forks_of_one_reading(name):
    pool = Pool(name)
    prefix = pool.read(PROMPTS[0])
    pool.insert([3, 0], prefix, KEYS[:2])
    pool.insert([1], prefix, KEYS[2:3])  # inserting consumed nothing
    pool.run()
    texts = [pool.new(row) for row in (3, 0, 1)]
    assert texts == [pool.alone(PROMPTS[0], key) for key in KEYS[:3]]
    assert len({tuple(text) for text in texts}) == 3
    assert pool.new(2) == []


@pytest.mark.parametrize("name", ["plain", *slow("mamba2attn hybrid")])
def test_a_row_replaced_amid_its_text(name):
    """Its drafter has a path to replay, and a catch-up token: none of it reaches the next row."""
    pool = Pool(name)
    for row, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        pool.insert([row], pool.read(prompt), KEYS[row : row + 1])
    for steps in (1, 1, 1):
        pool.run(max_steps=steps)
        assert not pool.state.done.any()
        assert (pool.state.drafter.reader.path.last >= 0).all()
        pool.insert([1], pool.read(PROMPTS[2]), KEYS[5:6])
    pool.run()
    assert pool.new(1) == pool.alone(PROMPTS[2], KEYS[5])
    for row, prompt in ((0, 0), (2, 2), (3, 0)):
        assert pool.new(row) == pool.alone(PROMPTS[prompt], KEYS[row])
    # Statistics begin with the tenant.
    counts = pool.state.statistics
    np.testing.assert_array_equal(counts.emitted, NEW_TOKENS)
    want = st.generate(
        pool.model, [PROMPTS[2]], key=KEYS[5:6], drafter=pool.drafter, topology=TREE, **pool.options
    )
    assert int(counts.target_calls[1]) == want.stats.num_target_calls
    np.testing.assert_array_equal(counts.accepted_per_depth[1], want.stats.accepted_per_depth)


@pytest.mark.parametrize("name", ["plain", *slow("bamba hybrid")])
def test_a_row_taken_out_and_extended(name):
    """Reading on is reading it all."""
    pool = Pool(name)
    pool.insert([2], pool.read(PROMPTS[2]), KEYS[:1])
    pool.run()
    first = pool.new(2)
    prefix = pool.take(2)
    whole = [*PROMPTS[2], *first, 8, 1, 30]
    longer, want = pool.read(whole, prefix), pool.read(whole)
    for got, expected in zip(
        jax.tree.leaves(longer.cache), jax.tree.leaves(want.cache), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    pool.insert([0], longer, KEYS[1:2])
    pool.insert([1], prefix, KEYS[2:3])
    pool.run()
    assert pool.new(0) == pool.alone(whole, KEYS[1])
    assert pool.new(1) == pool.alone([*PROMPTS[2], *first], KEYS[2])


def test_a_run_stops():
    pool = Pool()
    pool.limits = pool.limits._replace(max_new_tokens=jnp.array([5, 14, 5, 14]))
    for row in range(ROWS):
        pool.insert([row], pool.read(PROMPTS[0]), KEYS[:1])
    pool.run(max_steps=1)
    assert pool.state.step.tolist() == [1] * ROWS
    pool.run(stop_after_ended=1)  # two rows with one limit end together
    assert pool.state.done.tolist() == [True, False, True, False]
    pool.run(max_steps=0)
    pool.run(stop_after_ended=1)
    assert pool.state.done.all()
    assert pool.new(1) == pool.alone(PROMPTS[0], KEYS[0])


def test_refusals():
    pool = Pool()
    prefix = pool.read(PROMPTS[0])
    for rows in ([], [4], [-1], [1, 1]):
        with pytest.raises(ValueError, match="rows must be different ones of 0 to 3"):
            pool.insert(rows, prefix, KEYS[:1])
        with pytest.raises(ValueError, match="rows must be different ones of 0 to 3"):
            slots.end(pool.state, rows)
    with pytest.raises(ValueError, match="2 rows need as many keys"):
        pool.insert([0, 1], prefix, KEYS[:1])
    other = Pool("bamba hybrid")
    with pytest.raises(ValueError, match="other buffers or another model"):
        pool.insert([0], other.read(PROMPTS[0]), KEYS[:1])
    with pytest.raises(ValueError, match="row must be an integer, from 0 to 3; got 4"):
        pool.take(4)
    pool.insert([0], prefix, KEYS[:1])
    pool.state, _, _ = pool.decoder.step(
        pool.model, pool.drafter, pool.state, pool.limits, pool.sampling
    )
    for act in (
        lambda: pool.insert([1], prefix, KEYS[:1]),
        lambda: pool.take(0),
    ):
        with pytest.raises(ValueError, match="between runs only"):
            act()


def test_one_program_for_all_rows():
    pool = Pool()
    prefixes = [pool.read(prompt) for prompt in PROMPTS]
    for turn in range(2):
        before = len(COMPILED)
        for row in range(ROWS):
            pool.insert([(row + turn) % ROWS], prefixes[row % 3], KEYS[row : row + 1])
            pool.run(max_steps=row + turn, stop_after_ended=1 + row)
            pool.take(0)
        assert turn == 0 or len(COMPILED) == before
