"""The built-in logits processors, each against its definition."""

import dataclasses
import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.decoding.processors import Processing, first_states
from stree_jax.testing import PROMPTS, random_model, tiny_model
from tests.helpers import refusal, rows

VOCAB = 70  # more than two words of bits


def repetition(logits, prompt, output, penalty):
    seen = np.isin(np.arange(VOCAB), [*prompt, *output])
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence(logits, prompt, output, penalty):
    return logits - penalty * np.isin(np.arange(VOCAB), output)


def frequency(logits, prompt, output, penalty):
    return logits - penalty * np.bincount(output, minlength=VOCAB)


def bias(logits, prompt, output, values):
    return logits + np.array([values.get(token, 0.0) for token in range(VOCAB)])


def banned(logits, prompt, output, ids):
    return np.where(np.isin(np.arange(VOCAB), ids), -np.inf, logits)


def allowed(logits, prompt, output, ids):
    return np.where(np.isin(np.arange(VOCAB), [*ids]), logits, -np.inf)


def least(logits, prompt, output, number):
    return banned(logits, prompt, output, [3, 69] if len(output) < number else [])


# The options of two rows, from their numbers.
RULES = {
    "repetition": (st.RepetitionPenalty, repetition, (1.7, 0.6)),
    "presence": (st.PresencePenalty, presence, (1.7, -0.4)),
    "frequency": (st.FrequencyPenalty, frequency, (1.7, -0.4)),
    "bias": (st.LogitBias, bias, ({3: 1.0, 69: -2.0}, {0: -np.inf, 5: 0.5, 6: 1.0})),
    "banned": (st.BannedTokens, banned, ([3, 69], (0,))),
    "allowed": (st.AllowedTokens, allowed, ({3, 69}, range(7))),
    "least": (None, least, (2, 0)),
}


@functools.cache
def model():
    return random_model(st.ModelConfig.tiny(vocab_size=VOCAB, num_layers=1))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition(name):
    """Two rows of different prompts and numbers, at three nodes after 0, 1 and 4 new tokens."""
    make, definition, numbers = RULES[name]
    rng = np.random.default_rng(0)
    tokens, output = rng.integers(VOCAB, size=(2, 6)), rng.integers(VOCAB, size=(2, 4))
    output[:, 2] = output[:, 0]  # twice
    prompts = [tokens[0].tolist(), tokens[1, :3].tolist()]
    if make:
        own = rows(processors=[[make(number)] for number in numbers])
    else:
        own = rows(min_new_tokens=numbers, eos_token=[[3, 69]] * 2)
    request = plan(model(), prompts, options=own)
    rules = request.sampling.processors
    processing = Processing(rules, first_states(rules, request.context, VOCAB))
    states = processing.room(1)
    logits = rng.normal(size=(2, 1, VOCAB)).astype(np.float32)
    for new in range(5):
        got = np.asarray(processing(jnp.asarray(logits), states))
        for row, number in enumerate(numbers):
            want = definition(logits[row, 0], prompts[row], output[row, :new], number)
            np.testing.assert_allclose(got[row, 0], want, rtol=1e-6)
        if new < 4:
            states = processing.advance(states, jnp.asarray(output[:, new : new + 1]))


def test_a_fraction_is_no_integer():
    """Numbers of rows become an array of one type."""
    own = rows(processors=[[st.RepetitionPenalty(number)] for number in (Fraction(3, 2), 2, 1)])
    leaves = jax.tree.leaves(plan(model(), PROMPTS, own).sampling.processors)
    assert any(np.array_equal(leaf, np.float32([1.5, 2, 1])) for leaf in leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own(st.PresencePenalty):
    """A user's processor with the fields of a built-in one."""


@pytest.mark.parametrize(
    "classes",
    [(st.RepetitionPenalty, st.PresencePenalty, st.FrequencyPenalty, Own), (st.TopP, st.MinP)],
)
def test_classes_with_equal_fields_have_programs_of_their_own(classes):
    """To jax two such dataclasses have equal structures, and a program is found by structure."""
    name = "filters" if st.TopP in classes else "processors"

    def settings(*makes):
        heat = dict(temperature=[1.0] * len(makes), key=[0] * len(makes))
        own = rows(**heat, **{name: [[make(0.5)] for make in makes]})
        return plan(model(), [[1]] * len(makes), own).sampling

    structures = [jax.tree.structure(settings(make)) for make in classes]
    for (one, a), (other, b) in itertools.combinations(zip(classes, structures, strict=True), 2):
        assert a != b
        refusal("one program decodes all", settings, one, other)
    for make, structure in zip(classes, structures, strict=True):
        again = settings(make)
        assert jax.tree.structure(again) == structure
        # With other leaves, as when jax lowers.
        assert jax.tree.structure(jax.tree.map(lambda leaf: object(), again)) == structure


def test_a_rule_is_shown_as_it_was_made():
    assert repr(st.BannedTokens([7, 3])) == "BannedTokens([7, 3])"
    assert repr(st.LogitBias({7: -2.0})) == "LogitBias({7: -2.0})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forgetful(Own):
    """Returns a state of another dtype."""

    def init(self, context, vocab_size):
        return context.length

    def advance(self, state, tokens):
        return state + 0.5

    def __call__(self, logits, state, /):
        return logits


def test_what_is_refused():
    class Unregistered(st.PresencePenalty):
        pass

    with pytest.raises(ValueError, match="must be a pytree of numbers and arrays; make its class"):
        st.Options(processors=[Unregistered(1.0)])
    refusal(
        r"Forgetful.advance must .* int32\(3, 1\), and ret",
        st.generate,
        tiny_model(),
        PROMPTS,
        processors=[Forgetful(1.0)],
    )
    request = plan(tiny_model(), PROMPTS, processors=[st.BannedTokens([1])])
    state = request.decoder.start(tiny_model(), None, request.context, request.keys)
    refusal(
        "give the same sampling to `start` and `run`",
        request.decoder.run,
        tiny_model(),
        None,
        state,
        request.limits,
        request.sampling,
    )
