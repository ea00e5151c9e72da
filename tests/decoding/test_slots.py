"""The functions under a `Scheduler`: rows begin while others continue."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding import slots
from stree_jax.decoding.plan import plan
from stree_jax.testing import PROMPTS, perturbed, tiny_model

pytestmark = pytest.mark.thorough

ROWS, NEW_TOKENS = 4, 14
KEYS = jax.vmap(jax.random.key)(jnp.arange(10, 16))


class Pool:
    """Sampled rows, with the drafts of a model that often agrees."""

    def __init__(self, name="plain"):
        self.model = tiny_model(name)
        self.drafter = st.ModelDrafter(perturbed(self.model, 0.1))
        self.options = dict(drafter=self.drafter, topology=st.TreeTopology.from_branching((2, 1)))
        self.options |= dict(temperature=1.0)
        some = plan(self.model, [[0]] * ROWS, max_new_tokens=50, key=0, **self.options)
        self.decoder, self.sampling = some.decoder, some.sampling
        self.limits = some.limits._replace(max_new_tokens=jnp.full(ROWS, NEW_TOKENS))
        self.state = slots.empty(self.decoder, self.model, self.drafter, ROWS)

    def read(self, prompt, before=None):
        context = plan(self.model, [prompt], max_new_tokens=1).context
        return self.decoder.read(self.model, self.drafter, context, before)

    def insert(self, rows, prefix, keys):
        self.state = slots.insert(self.decoder, self.model, self.state, rows, prefix, keys)

    def run(self, max_steps=None, stop_after_ended=None):
        self.state = self.decoder.run(
            *(self.model, self.drafter, self.state, self.limits, self.sampling),
            max_steps,
            stop_after_ended,
        )

    def new(self, row):
        end, count = int(self.state.context.length[row]), int(self.state.emitted[row])
        return self.state.context.tokens[row, end - count : end].tolist()

    def check(self, row, prompt, key):
        """The row is what `generate` gives, statistics too."""
        options = dict(max_new_tokens=NEW_TOKENS, key=key[None], **self.options)
        want = st.generate(self.model, [prompt], **options)
        assert self.new(row) == want.tokens[0].tolist()
        counts = self.state.statistics
        assert int(counts.target_calls[row]) == want.stats.num_target_calls
        np.testing.assert_array_equal(counts.accepted_per_depth[row], want.stats.accepted_per_depth)


def test_rows_begin_and_end_while_others_continue():
    """Forks of one prefill; a row replaced amid its text; one that is taken out and goes on."""
    pool = Pool()
    prefix = pool.read(PROMPTS[0])
    pool.insert([3, 0], prefix, KEYS[:2])
    pool.insert([1], prefix, KEYS[2:3])  # inserting consumed nothing
    pool.insert([2], pool.read(PROMPTS[1]), KEYS[3:4])
    for _ in range(3):
        pool.run(max_steps=1)
        assert not pool.state.done.any()
        # Nothing that the drafter has to replay reaches the next tenant.
        assert (pool.state.drafter.model_state.path.last >= 0).all()
        pool.insert([1], pool.read(PROMPTS[2]), KEYS[5:6])
    pool.run()
    for row, prompt, key in ((3, 0, 0), (0, 0, 1), (2, 1, 3), (1, 2, 5)):
        pool.check(row, PROMPTS[prompt], KEYS[key])
    text = [*PROMPTS[2], *pool.new(1)]
    prefix = slots.take(pool.state, 1)
    pool.insert([0], pool.read([*text, 8, 1, 30], prefix), KEYS[:1])
    pool.insert([3], prefix, KEYS[4:5])
    pool.run()
    pool.check(0, [*text, 8, 1, 30], KEYS[0])
    pool.check(3, text, KEYS[4])


def test_a_run_stops():
    pool = Pool()
    pool.limits = pool.limits._replace(max_new_tokens=jnp.array([5, 14, 5, 14]))
    pool.insert([*range(ROWS)], pool.read(PROMPTS[0]), KEYS[jnp.zeros(ROWS, int)])
    pool.run(max_steps=1)
    assert pool.state.step.tolist() == [1] * ROWS
    pool.run(stop_after_ended=1)  # two rows with one limit end together
    assert pool.state.done.tolist() == [True, False, True, False]
    pool.run(max_steps=0)
    pool.run(stop_after_ended=1)
    assert pool.state.done.all()


def test_refusals():
    pool, different = Pool(), "rows must be different ones of 0 to 3"
    prefix = pool.read(PROMPTS[0])
    other = Pool("bamba hybrid").read(PROMPTS[0])
    calls = [
        (lambda: pool.insert([], prefix, KEYS[:1]), different),
        (lambda: pool.insert([1, 1], prefix, KEYS[:1]), different),
        (lambda: slots.end(pool.state, [4]), different),
        (lambda: pool.insert([0, 1], prefix, KEYS[:1]), "2 rows need as many keys"),
        (lambda: pool.insert([0], other, KEYS[:1]), "other buffers or another model"),
        (lambda: slots.take(pool.state, 4), "row must be an integer, from 0 to 3; got 4"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    pool.insert([0], prefix, KEYS[:1])
    request = pool.model, pool.drafter, pool.state, pool.limits, pool.sampling
    pool.state, _, _ = pool.decoder.step(*request)
    for call in (lambda: pool.insert([1], prefix, KEYS[:1]), lambda: slots.take(pool.state, 0)):
        with pytest.raises(ValueError, match="between runs only"):
            call()
