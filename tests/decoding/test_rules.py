"""The built-in logits processors, each against its definition; and what is refused."""

import dataclasses
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.decoding.processors import Processing, first_states
from stree_jax.decoding.rows import Row, filters_of, processors_of
from stree_jax.decoding.rule_rows import joined, kind
from stree_jax.decoding.token_rules import MinNewTokens
from stree_jax.decoding.types import Sampling
from stree_jax.testing import PROMPTS, tiny_model
from tests.helpers import COMPILED

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


RULES = {
    "repetition": (st.RepetitionPenalty, repetition, (1.7, 0.6)),
    "presence": (st.PresencePenalty, presence, (1.7, -0.4)),
    "frequency": (st.FrequencyPenalty, frequency, (1.7, -0.4)),
    "bias": (st.LogitBias, bias, ({3: 1.0, 69: -2.0}, {0: -np.inf, 5: 0.5, 6: 1.0})),
    "banned": (st.BannedTokens, banned, ([3, 69], (0,))),
    "allowed": (st.AllowedTokens, allowed, ({3, 69}, range(7))),
    "least": (lambda n: MinNewTokens(n, np.array([3, 69, -1])), least, (2, 0)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition(name):
    """Two rows of different prompts and numbers, at three nodes after 0, 1 and 4 new tokens."""
    make, definition, numbers = RULES[name]
    rng = np.random.default_rng(0)
    prompts, output = rng.integers(VOCAB, size=(2, 6)), rng.integers(VOCAB, size=(2, 4))
    output[:, 2] = output[:, 0]  # twice
    lengths = np.array([6, 3])
    context = st.Context(jnp.asarray(prompts), jnp.asarray(lengths))
    rule = (joined([make(number) for number in numbers]),)
    processing = Processing(rule, first_states(rule, context, VOCAB))
    logits = rng.normal(size=(2, 1, VOCAB)).astype(np.float32)
    states = processing.room(1)
    for new in range(5):
        got = np.asarray(processing(jnp.asarray(logits), states))
        for row in range(2):
            text = prompts[row, : lengths[row]], output[row, :new]
            want = definition(logits[row, 0], *text, numbers[row])
            np.testing.assert_allclose(got[row, 0], want, rtol=1e-6)
        if new < 4:
            states = processing.advance(states, jnp.asarray(output[:, new : new + 1]))


def test_a_fraction_is_no_integer():
    """Numbers of rows become an array of one type."""
    rows = [st.RepetitionPenalty(number) for number in (Fraction(3, 2), 2)]
    np.testing.assert_array_equal(joined(rows).penalty, np.float32([1.5, 2]))
    np.testing.assert_array_equal(joined([st.TopK(10**40), st.TopK(2)]).k, [2**31 - 1, 2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own(st.PresencePenalty):
    """A user's processor with the fields of a built-in one."""


def settings(classes, may_differ=False):
    """Settings that differ in nothing but the class of a processor or a filter."""
    for make in classes:
        name = "processors" if hasattr(make, "advance") else "filters"
        rows = [Row(**{name: (make(0.5),)})] * 2
        parts = (f(rows, may_differ=may_differ) for f in (filters_of, processors_of))
        yield Sampling(jnp.ones(2), *parts)


@pytest.mark.parametrize("may_differ", [False, True])
@pytest.mark.parametrize(
    "classes",
    [
        (st.RepetitionPenalty, st.PresencePenalty, st.FrequencyPenalty, Own),
        (st.TopP, st.MinP),
    ],
)
def test_classes_with_equal_fields_have_programs_of_their_own(classes, may_differ):
    """To jax two such dataclasses have equal structures, and a program is found by structure."""
    structures = [jax.tree.structure(one) for one in settings(classes, may_differ)]
    for one, other in itertools.combinations(structures, 2):
        assert one != other
    kinds = [(kind(one.filters), kind(one.processors)) for one in settings(classes)]
    assert len({str(kind) for kind in kinds}) == len(classes)
    again = [jax.tree.structure(one) for one in settings(classes, may_differ)]
    assert structures == again
    for one in settings(classes, may_differ):  # with other leaves, as when jax lowers
        assert jax.tree.structure(jax.tree.map(lambda leaf: object(), one)) in structures


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: st.RepetitionPenalty(0), "RepetitionPenalty takes a number above 0, got 0"),
        (lambda: st.PresencePenalty(np.nan), "PresencePenalty takes a number, got nan"),
        (lambda: st.FrequencyPenalty("1"), "FrequencyPenalty takes a number, got '1'"),
        (lambda: st.LogitBias({3: np.inf}), "has the bias inf for token 3; give a finite"),
        (lambda: st.LogitBias({3: None}), "has the bias None for token 3"),
        (lambda: st.LogitBias({-1: 2.0}), "a token id of LogitBias must be an integer, from 0"),
        (lambda: st.LogitBias([1, 2]), r"LogitBias takes a dict such as \{7: -2.0\}, got \[1, 2\]"),
        (lambda: st.LogitBias({3: 10**400}), "has the bias 10+.* for token 3; give a finite"),
        (lambda: st.LogitBias({3: 1e39}), r"has the bias 1e\+39 for token 3; give a finite"),
        (lambda: st.LogitBias({3: -1e39}), r"has the bias -1e\+39 for token 3"),
        (lambda: st.LogitBias({3: True}), "has the bias True for token 3"),
        (lambda: st.LogitBias(None), r"LogitBias takes a dict such as \{7: -2.0\}, got None"),
        (lambda: st.LogitBias(np.ones(3)), "LogitBias takes a dict"),
        (lambda: st.LogitBias(((1, 2), (3, 4))), "LogitBias takes a dict"),
        (lambda: st.RepetitionPenalty(10**400), "RepetitionPenalty takes a number above 0, got 1"),
        (lambda: st.RepetitionPenalty(1e-46), "takes a number above 0, got 1e-46"),
        (
            lambda: st.Options(processors=[st.RepetitionPenalty(None)]),
            r"processor RepetitionPenalty\(penalty=None\) must be a pytree of numbers",
        ),
        (lambda: st.PresencePenalty((1.0,)), r"PresencePenalty takes a number, got \(1.0,\)"),
        (lambda: st.PresencePenalty(1e39), r"PresencePenalty takes a number, got 1e\+39"),
        (lambda: st.PresencePenalty(True), "PresencePenalty takes a number, got True"),
        (lambda: st.FrequencyPenalty([1.0]), r"FrequencyPenalty takes a number, got \[1.0\]"),
        (lambda: st.BannedTokens({1: 2}), r"takes a list of token ids, got \{1: 2\}"),
        (
            lambda: st.Options(processors=[st.BannedTokens(None)]),
            "processor <BannedTokens> must be a pytree of numbers",
        ),
        (lambda: st.AllowedTokens(b"ab"), "takes a list of token ids, got b'ab'"),
        (lambda: st.AllowedTokens(token for token in [1]), "takes a list of token ids, got <gener"),
        (lambda: st.BannedTokens(jnp.array([-1])).check(37), "has token id -1, outside the voc"),
        (lambda: st.TopK({1}), r"top_k must be an integer, at least 0; got \{1\}"),
        (
            lambda: st.Options(filters=[st.TopP(None)]),
            r"filter TopP\(p=None\) must be a pytree of numbers",
        ),
        (lambda: st.MinP([0.1]), r"min_p must be from 0 to 1, got \[0.1\]"),
        (lambda: st.Options(top_p=True), r"top_p must be in \(0, 1\], got True"),
        (lambda: st.Options(min_p=False), "min_p must be from 0 to 1, got False"),
        (lambda: st.Options(temperature=True), "temperature must be a number from 0 on, got True"),
        (lambda: st.Options(log_probs=1), "log_probs must be False, True or 'sampled', got 1"),
        (lambda: st.Options(log_probs=0.0), "log_probs must be False, True or 'sampled', got 0.0"),
        (lambda: st.BannedTokens([]), "BannedTokens has no token ids; leave the processor out"),
        (lambda: st.BannedTokens(3), "BannedTokens takes a list of token ids, got 3"),
        (lambda: st.BannedTokens([0.5]), "a token id of BannedTokens must be an integer"),
        (lambda: st.AllowedTokens(["a"]), "a token id of AllowedTokens must be an integer"),
        (lambda: st.MinP(1.5), "min_p must be from 0 to 1, got 1.5"),
        (lambda: st.Options(min_p=-0.1), "min_p must be from 0 to 1, got -0.1"),
        (lambda: st.Options(min_new_tokens=-1), "min_new_tokens must be an integer, from 0 to 64"),
        (lambda: st.Options(min_new_tokens=9, max_new_tokens=8), "from 0 to 8; got 9"),
        (lambda: st.Options(processors="grammar"), "processors must be a list such as"),
        (lambda: st.Options(processors=[st.BannedTokens]), "objects with the methods of"),
        (lambda: st.Request([1], processors=[lambda logits: logits]), "objects with the methods"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rule", [st.LogitBias({37: 1.0}), st.BannedTokens([1, 37])])
def test_ids_outside_the_vocabulary_are_refused(rule):
    with pytest.raises(ValueError, match="has token id 37, outside the vocabulary of 37"):
        st.generate(tiny_model(), PROMPTS, processors=[rule])


def test_a_rule_is_shown_as_it_was_made():
    assert repr(st.BannedTokens([7, 3])) == "BannedTokens([7, 3])"
    assert repr(st.LogitBias({7: -2.0})) == "LogitBias({7: -2.0})"


def test_a_processor_must_be_a_pytree_of_arrays():
    class Unregistered(st.PresencePenalty):
        pass

    with pytest.raises(ValueError, match="must be a pytree of numbers and arrays; make its class"):
        st.Options(processors=[Unregistered(1.0)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forgetful:
    """Returns a state of another dtype."""

    def init(self, context, vocab_size):
        return context.length

    def advance(self, state, tokens):
        return state + 0.5

    def __call__(self, logits, state, /):
        return logits


def test_a_state_keeps_its_shape_and_dtype():
    with pytest.raises(ValueError, match=r"Forgetful.advance must .* int32\(3, 1\), and ret"):
        st.generate(tiny_model(), PROMPTS, processors=[Forgetful()])


def test_other_numbers_share_the_program():
    """Also more ids, up to 8, and another number of first tokens."""

    def compiled(penalty, ids, least):
        before = len(COMPILED)
        processors = [st.RepetitionPenalty(penalty), st.BannedTokens(ids)]
        options = dict(max_new_tokens=4, processors=processors, min_new_tokens=least, eos_token=3)
        st.generate(tiny_model(), PROMPTS, **options)
        return len(COMPILED) - before

    assert compiled(1.2, [4], 2) > 0
    assert compiled(1.7, [5, 6, 7, 8, 9], 3) == 0


def test_rows_without_rules_are_left_alone():
    """Beside rows with rules; and no row with rules makes no processor."""
    assert processors_of([Row()] * 2, may_differ=True) == ()
    last = Row(min_new_tokens=2, end_tokens=[5, -1])
    rules = [Row(processors=(st.BannedTokens([1]),)), Row(), last]
    processors = processors_of(rules, may_differ=True)
    context = st.Context(jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32))
    processing = Processing(processors, first_states(processors, context, VOCAB))
    ruled_out = jnp.isneginf(processing(jnp.zeros((3, 1, VOCAB)), processing.room(1)))
    assert [np.flatnonzero(row).tolist() for row in ruled_out[:, 0]] == [[1], [], [5]]


def test_a_state_must_be_started_with_its_processors():
    request = plan(tiny_model(), PROMPTS, processors=[st.BannedTokens([1])])
    state = request.decoder.start(tiny_model(), None, request.context, request.keys)
    with pytest.raises(ValueError, match="give the same sampling to `start` and `run`"):
        request.decoder.run(tiny_model(), None, state, request.limits, request.sampling)
