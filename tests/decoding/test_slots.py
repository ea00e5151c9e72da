"""The functions under a `Scheduler`, whose texts and statistics are in tests/serving."""

import jax
import jax.numpy as jnp
import pytest

import stree_jax as st
from stree_jax.decoding import slots
from stree_jax.decoding.plan import plan
from stree_jax.testing import PROMPTS, perturbed, tiny_model
from tests.helpers import refusal

pytestmark = pytest.mark.thorough

ROWS = 4
KEYS = jax.random.split(jax.random.key(10), 1)


class Pool:
    """Sampled rows, with the drafts of a model that often agrees."""

    def __init__(self, name="plain"):
        self.model = tiny_model(name)
        self.drafter = st.ModelDrafter(perturbed(self.model, 0.1))
        options = dict(drafter=self.drafter, topology=st.TreeTopology.from_branching((2, 1)))
        options |= dict(temperature=1.0)
        request = plan(self.model, [[0]] * ROWS, max_new_tokens=50, key=0, **options)
        self.decoder, self.sampling, self.limits = request.decoder, request.sampling, request.limits
        self.state = slots.empty(self.decoder, self.model, self.drafter, ROWS)

    def read(self, prompt):
        context = plan(self.model, [prompt], max_new_tokens=1).context
        return self.decoder.read(self.model, self.drafter, context)

    def insert(self, rows, prefix, keys):
        self.state = slots.insert(self.decoder, self.model, self.state, rows, prefix, keys)

    def run(self, max_steps=None, stop_after_ended=None):
        self.state = self.decoder.run(
            *(self.model, self.drafter, self.state, self.limits, self.sampling),
            max_steps,
            stop_after_ended,
        )


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
    foreign = Pool("bamba hybrid").read(PROMPTS[0])
    calls = [
        (lambda: pool.insert([], prefix, KEYS), different),
        (lambda: pool.insert([1, 1], prefix, KEYS), different),
        (lambda: slots.end(pool.state, [4]), different),
        (lambda: pool.insert([0, 1], prefix, KEYS), "2 rows need as many keys"),
        (lambda: pool.insert([0], foreign, KEYS), "other buffers or another model"),
        (lambda: slots.take(pool.state, 4), "row must be an integer, from 0 to 3; got 4"),
    ]
    for call, message in calls:
        refusal(message, call)
    pool.insert([0], prefix, KEYS)
    request = pool.model, pool.drafter, pool.state, pool.limits, pool.sampling
    pool.state, _, _ = pool.decoder.step(*request)
    for call in (lambda: pool.insert([1], prefix, KEYS), lambda: slots.take(pool.state, 0)):
        refusal("between runs only", call)
