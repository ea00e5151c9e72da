"""Log-probabilities of new tokens and given texts, against float64; and why rows end."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

import stree_jax as st
from stree_jax.decoding.score import scored
from stree_jax.testing import CONFIGS, bits_obstacle, perturbed, random_model, tiny_model
from tests import oracle
from tests.decoding.texts import broken_at
from tests.helpers import refusal
from tests.methods import KEY, PROMPTS, TREE, drafts
from tests.numpy_parts import log_softmax

thorough = pytest.mark.thorough

NEW_TOKENS = 10


@functools.cache
def float64(text):
    """The model's log-probabilities after each token of a text."""
    return oracle.log_probs(tiny_model(), text)


def at_new_tokens(prompt, new):
    """`[T, V]`, of the distribution that each new token was drawn from."""
    return float64((*prompt, *new))[len(prompt) - 1 : -1]


def filtered(log_probs, temperature, top_k):
    scaled = log_probs / temperature
    kept = np.where(scaled >= np.sort(scaled, axis=-1)[:, -top_k, None], scaled, -np.inf)
    return log_softmax(kept)


def check(prompt, tokens, log_probs):
    want = at_new_tokens(prompt, tokens)
    want = want[np.arange(len(tokens)), tokens]
    assert_allclose(log_probs, want, atol=1e-4, err_msg=f"{prompt}")


def options_of(target, name):
    if name == "traversal":
        drafter = st.ModelDrafter(perturbed(target, 0.1), child_sampling="without_replacement")
        return dict(drafter=drafter, topology=TREE)
    return drafts(target, name) if name else {}


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *(pytest.param(each, 0.0, marks=thorough) for each in (None, "dynamic", "lookup")),
        pytest.param("traversal", 1.3, marks=thorough),
        ("branching", 0.8),
    ],
)
def test_log_probs_are_the_models_own(name, temperature):
    """Unfiltered and at temperature 1, whatever the text was drawn with."""
    target = tiny_model()
    options = options_of(target, name)
    ways = dict(temperature=temperature, top_p=0.9, key=KEY, eos_token=[1, 2])
    ways |= dict(max_new_tokens=NEW_TOKENS, log_probs=True, top_log_probs=3)
    out = st.generate(target, PROMPTS, **ways, **options)
    assert out.log_probs.dtype == out.top_log_probs.dtype == np.float32
    assert out.top_log_probs.shape == out.top_tokens.shape == (3, NEW_TOKENS, 3)
    if options:
        assert out.stats.num_accepted > 0
    for row, (prompt, count) in enumerate(zip(PROMPTS, out.lengths, strict=True)):
        new = out.tokens[row, :count].tolist()
        check(prompt, new, out.log_probs[row, :count])
        want = at_new_tokens(prompt, new)
        tokens = out.top_tokens[row, :count]
        for best in (-np.sort(-want)[:, :3], np.take_along_axis(want, tokens, axis=1)):
            assert_allclose(out.top_log_probs[row, :count], best, atol=1e-4)
        assert np.isnan(out.log_probs[row, count:]).all()
        assert np.isnan(out.top_log_probs[row, count:]).all()
        assert (out.top_tokens[row, count:] == st.PAD).all()


@pytest.mark.parametrize("greedy", [True, pytest.param(False, marks=thorough)])
def test_sampled_log_probs_are_after_processors_and_filters_at_temperature_0_too(greedy):
    """There temperature counts as 1; another row has another one, or the same."""
    target, heats = tiny_model().packed(), (0.0, 0.0 if greedy else 0.7, 0.0)
    settings = dict(top_k=5, filters=[st.TopK(4)], key=3, eos_token=())
    settings["processors"], bias = [st.LogitBias({3: 2.0})], 2.0 * (np.arange(37) == 3)
    settings |= dict(max_new_tokens=NEW_TOKENS, log_probs="sampled")
    options = [st.Options(temperature=heat, **settings) for heat in heats]
    plain, drafted = (
        st.generate(target, PROMPTS, options=options, **ways) for ways in ({}, drafts(target))
    )
    assert drafted.stats.num_accepted > 0
    assert_array_equal(drafted.tokens, plain.tokens)
    if bits_obstacle(target) is None:
        assert_array_equal(drafted.log_probs, plain.log_probs)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, plain.tokens.tolist(), strict=True)):
        want = filtered(at_new_tokens(prompt, tokens) + bias, heats[row] or 1.0, 4)
        want = want[np.arange(NEW_TOKENS), tokens]
        assert_allclose(drafted.log_probs[row], want, atol=1e-4)


def test_without_the_option_nothing_is_recorded():
    out = st.generate(tiny_model(), PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.log_probs is out.top_log_probs is out.top_tokens is None
    only_best = st.generate(tiny_model(), PROMPTS, max_new_tokens=NEW_TOKENS, top_log_probs=1)
    assert_array_equal(only_best.tokens, only_best.top_tokens[..., 0])
    assert_array_equal(only_best.log_probs, only_best.top_log_probs[..., 0])


@thorough
def test_a_scheduler_records_for_those_who_ask():
    """The pool has no records at first, then more and more."""
    model, keys = tiny_model(), jax.random.split(KEY, 4)
    ways = [
        {},
        dict(log_probs="sampled", temperature=0.7, top_k=5),
        dict(temperature=1.0),
        dict(log_probs=True, top_log_probs=6),
    ]
    scheduler = st.Scheduler(model, rows=2, max_length=60, quantum=2, **drafts(model))
    requests = [
        st.Request(PROMPTS[i % 3], max_new_tokens=6 + i, key=key, eos_token=1, **way)
        for i, (way, key) in enumerate(zip(ways, keys, strict=True))
    ]
    for request in requests:
        scheduler.submit(request)
    for done in scheduler.completions():
        request = requests[done.request_id]
        alone = st.generate(model, [request.prompt], options=[request])
        assert done.finish_reason == alone.finish_reasons[0]
        for name in ("log_probs", "top_log_probs", "top_tokens"):
            got, want = getattr(done, name), getattr(alone, name)
            if want is None:
                assert got is None
            else:
                assert_allclose(got, want[0, : alone.lengths[0]], atol=1e-4)


def test_why_rows_end():
    """At end tokens inside of accepted paths too, at different steps; others continue."""
    model, common = tiny_model(), dict(max_new_tokens=NEW_TOKENS)
    free = st.generate(model, PROMPTS, **common)
    assert free.finish_reasons == ["length"] * 3
    end = int(free.tokens[0, 4])
    first = [[*row, end].index(end) + 1 for row in free.tokens.tolist()]
    for options in ({}, drafts(model), dict(max_new_tokens=first[0])):  # the last token that fits
        out = st.generate(model, PROMPTS, **common | dict(eos_token=end) | options)
        most = options.get("max_new_tokens", NEW_TOKENS)
        assert out.finish_reasons == ["end_token" if at <= most else "length" for at in first]
        assert out.finish_reasons[0] == "end_token"
        assert out.lengths.tolist() == [min(at, most) for at in first]
        kept = np.arange(most) < out.lengths[:, None]
        assert_array_equal(out.tokens, np.where(kept, free.tokens[:, :most], st.PAD))
    with pytest.raises(st.NonFiniteLogitsError) as error:
        st.generate(broken_at(35, model=tiny_model()), [[1, 2], [3, 35], [4]], log_probs=True)
    out = error.value.generation
    assert out.finish_reasons[1] == "failed"
    assert np.isnan(out.log_probs[1]).all()


# Of given texts.

TEXTS = [*PROMPTS[:2], [*PROMPTS[2], 7], [36, 0]]


def scores_of(model, text):
    return oracle.log_probs(model, text)[np.arange(len(text) - 1), text[1:]]


def test_the_last_token_may_come_right_after_the_context():
    """Nothing reads it. Of each token also: is it the best?

    The embedding has padded rows; three rows a time leave some for a second call.
    """
    model = random_model(dataclasses.replace(CONFIGS["groups"], max_length=10))
    new = st.generate(model, [[5]], max_new_tokens=4, eos_token=()).tokens[0].tolist()
    texts = [*TEXTS, [5, *new]]
    scores = st.score(model, texts, rows=3)
    for row, log_probs, is_best in scored(model, texts, 3):
        assert_array_equal(scores[row], log_probs)
        assert_allclose(log_probs, scores_of(model, texts[row]), atol=1e-4)
        best = oracle.log_probs(model, texts[row]).argmax(-1)[:-1]
        assert_array_equal(is_best, best == texts[row][1:])
        assert is_best.all() == (row == 4 or texts[row] == [3])
    refusal(
        r"texts\[2\] has 12 tokens, and .* context is 10; cut it",
        st.score,
        model,
        [TEXTS[2], [1], [*TEXTS[2], 1]],
    )


@pytest.mark.parametrize("shape", [(2, 1), (2, 0), (0, 3), (0, 0)])
def test_texts_without_a_token_to_score(shape):
    """No log-probabilities, and no gradient."""
    model, tokens = tiny_model(), jnp.zeros(shape, jnp.int32)
    got, gradient = nnx.value_and_grad(lambda model: st.text_log_probs(model, tokens).sum())(model)
    assert st.text_log_probs(model, tokens).shape == (shape[0], max(shape[1] - 1, 0))
    assert not any(leaf.any() for leaf in jax.tree.leaves((got, gradient)))


@thorough
def test_in_chunks_of_places_and_of_the_vocabulary(monkeypatch):
    """Chunks of 16 places, of which logits exist for 4 at a time."""
    model, rng = tiny_model("mamba2attn hybrid"), np.random.default_rng(0)
    texts = [rng.integers(37, size=n).tolist() for n in (70, 33, 17, 2)]
    for module, name, value in (
        ("prefix.prefill", "PREFILL_CHUNK", 16),
        ("score", "PREFILL_CHUNK", 16),
        ("score", "_MOST_LOGITS", 4 * 4 * 37),
    ):
        monkeypatch.setattr(importlib.import_module(f"stree_jax.decoding.{module}"), name, value)
    # No other test scores four texts of this length, so the program is traced here.
    for text, got in zip(texts, st.score(model, texts), strict=True):
        assert_allclose(got, scores_of(model, text), atol=1e-4)


@thorough
def test_the_differentiable_form():
    model = random_model(st.ModelConfig.tiny(num_layers=1))
    structure, weights = nnx.split(model)

    @jax.jit
    def total(weights):
        return st.text_log_probs(nnx.merge(structure, weights), jnp.array(TEXTS[:1])).sum()

    assert_allclose(total(weights), scores_of(model, TEXTS[0]).sum(), rtol=1e-5)
    slope = jax.jit(jax.grad(total))(weights)
    norm = optax.tree.norm(slope)
    up, down = (
        total(jax.tree.map(lambda w, g, sign=sign: w + sign * 1e-3 * g / norm, weights, slope))
        for sign in (1, -1)
    )
    assert_allclose((up - down) / 2e-3, norm, rtol=2e-2)
