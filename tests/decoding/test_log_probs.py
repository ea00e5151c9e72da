"""Log-probabilities of new tokens, against an independent model in float64; and why rows end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.testing import PROMPTS, perturbed, tiny_model
from tests import oracle
from tests.helpers import with_weight

TREE = st.TreeTopology.from_branching((2, 2))
KEY = jax.random.key(3)
NEW_TOKENS = 10


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@functools.cache
def float64(family, text):
    """The model's log-probabilities after each token of a text."""
    return log_softmax(oracle.logits(tiny_model(family), text)[:, : tiny_model().config.vocab_size])


def at_new_tokens(family, prompt, new):
    """`[T, V]`, of the distribution that each new token was drawn from."""
    return float64(family, (*prompt, *new))[len(prompt) - 1 : -1]


def filtered(log_probs, temperature, top_k):
    scaled = log_probs / temperature
    worst = np.sort(scaled, axis=-1)[:, -top_k, None]
    return log_softmax(np.where(scaled >= worst, scaled, -np.inf))


def check(family, prompt, tokens, log_probs):
    want = at_new_tokens(family, prompt, tokens)
    np.testing.assert_allclose(
        log_probs, want[np.arange(len(tokens)), tokens], atol=1e-4, err_msg=f"{prompt}"
    )


def drafters(target):
    draft = perturbed(target, 0.1)
    return {
        "none": {},
        "tree": dict(drafter=st.ModelDrafter(draft), topology=TREE),
        "dynamic": dict(
            drafter=st.DynamicDrafter(draft, expand=2), topology=st.TreeTopology.budget(7, 3)
        ),
        "lookup": dict(drafter=st.NgramDrafter(), topology=st.TreeTopology.chain(4)),
        "traversal": dict(
            drafter=st.ModelDrafter(draft, child_sampling="without_replacement"), topology=TREE
        ),
    }


@pytest.mark.parametrize(
    ("family", "drafts", "temperature"),
    [
        ("plain", "none", 0.0),
        ("plain", "dynamic", 0.0),
        ("plain", "lookup", 0.0),
        ("plain", "traversal", 1.3),
        ("mamba2attn hybrid", "tree", 0.8),
    ],
)
def test_log_probs_are_the_models_own(family, drafts, temperature):
    """Unfiltered and at temperature 1, whatever the text was drawn with."""
    target = tiny_model(family)
    out = st.generate(
        target,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        top_p=0.9,
        key=KEY,
        eos_token=[1, 2],
        log_probs=True,
        top_log_probs=3,
        **drafters(target)[drafts],
    )
    assert out.log_probs.dtype == out.top_log_probs.dtype == np.float32
    assert out.top_log_probs.shape == out.top_tokens.shape == (3, NEW_TOKENS, 3)
    if drafts != "none":
        assert out.stats.num_accepted > 0
    for row, (prompt, count) in enumerate(zip(PROMPTS, out.lengths, strict=True)):
        new = out.tokens[row, :count].tolist()
        check(family, prompt, new, out.log_probs[row, :count])
        want = at_new_tokens(family, prompt, new)
        tokens = out.top_tokens[row, :count]
        np.testing.assert_allclose(
            out.top_log_probs[row, :count], -np.sort(-want)[:, :3], atol=1e-4
        )
        np.testing.assert_allclose(
            out.top_log_probs[row, :count], np.take_along_axis(want, tokens, axis=1), atol=1e-4
        )
        assert np.isnan(out.log_probs[row, count:]).all()
        assert np.isnan(out.top_log_probs[row, count:]).all()
        assert (out.top_tokens[row, count:] == st.PAD).all()


def test_log_probs_of_the_sampled_distribution():
    target = tiny_model()
    options = dict(max_new_tokens=NEW_TOKENS, temperature=0.7, top_k=5, key=KEY)
    plain = st.generate(target, PROMPTS, **options, log_probs="sampled")
    drafts = drafters(target)["tree"]
    trees = st.generate(target, PROMPTS, **options, log_probs="sampled", **drafts)
    np.testing.assert_array_equal(plain.tokens, trees.tokens)
    np.testing.assert_allclose(plain.log_probs, trees.log_probs, atol=1e-4)
    assert trees.top_tokens is None
    for row, prompt in enumerate(PROMPTS):
        new = trees.tokens[row].tolist()
        want = filtered(at_new_tokens("plain", prompt, new), 0.7, 5)
        np.testing.assert_allclose(trees.log_probs[row], want[np.arange(len(new)), new], atol=1e-4)


def test_without_the_option_nothing_is_recorded():
    out = st.generate(tiny_model(), PROMPTS, max_new_tokens=NEW_TOKENS)
    assert out.log_probs is out.top_log_probs is out.top_tokens is None
    only_best = st.generate(tiny_model(), PROMPTS, max_new_tokens=NEW_TOKENS, top_log_probs=1)
    np.testing.assert_array_equal(only_best.tokens, only_best.top_tokens[..., 0])
    np.testing.assert_array_equal(only_best.log_probs, only_best.top_log_probs[..., 0])


def test_a_scheduler_records_for_those_who_ask():
    """The pool has no records at first, then more and more."""
    model, keys = tiny_model(), jax.random.split(KEY, 4)
    ways = [
        {},
        dict(log_probs="sampled", temperature=0.7, top_k=5),
        dict(temperature=1.0),
        dict(log_probs=True, top_log_probs=6),
    ]
    scheduler = st.Scheduler(model, rows=2, max_length=60, quantum=2, **drafters(model)["tree"])
    for i, (way, key) in enumerate(zip(ways, keys, strict=True)):
        request = st.Request(PROMPTS[i % 3], max_new_tokens=6 + i, key=key, eos_token=1, **way)
        scheduler.submit(request)
    for done in scheduler.completions():
        way, prompt = ways[done.request_id], PROMPTS[done.request_id % 3]
        assert done.finish_reason == ("end_token" if done.tokens[-1] == 1 else "length")
        most = way.get("top_log_probs", 0)
        if "log_probs" not in way and not most:
            assert done.log_probs is None
        elif way.get("log_probs") == "sampled":
            want = filtered(at_new_tokens("plain", prompt, done.tokens), 0.7, 5)
            want = want[np.arange(len(done.tokens)), done.tokens]
            np.testing.assert_allclose(done.log_probs, want, atol=1e-4)
        else:
            check("plain", prompt, done.tokens, done.log_probs)
        if most:
            want = at_new_tokens("plain", prompt, done.tokens)
            np.testing.assert_allclose(done.top_log_probs, -np.sort(-want)[:, :most], atol=1e-4)
            assert np.shape(done.top_tokens) == (len(done.tokens), most)
        else:
            assert done.top_log_probs is done.top_tokens is None


def test_why_rows_end():
    model = tiny_model()
    free = st.generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert free.finish_reasons == ["length"] * 3
    end = int(free.tokens[0, 4])
    first = [
        next((i + 1 for i, token in enumerate(row) if token == end), 99) for row in free.tokens
    ]
    for drafts in ({}, drafters(model)["tree"]):
        out = st.generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, eos_token=end, **drafts)
        assert out.finish_reasons == ["end_token" if at <= NEW_TOKENS else "length" for at in first]
        assert "end_token" in out.finish_reasons
    # The end token is the last that fits.
    out = st.generate(model, PROMPTS, max_new_tokens=first[0], eos_token=end)
    assert out.finish_reasons[0] == "end_token"
    broken = with_weight(model, "embedding", lambda rows: rows.at[35].set(jnp.nan))
    with pytest.raises(st.NonFiniteLogitsError) as error:
        st.generate(broken, [[1, 2], [3, 35], [4]], max_new_tokens=4, log_probs=True)
    out = error.value.generation
    assert out.finish_reasons[1] == "failed"
    assert np.isnan(out.log_probs[1]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(log_probs="raw"), "log_probs must be False, True or 'sampled', got 'raw'"),
        (dict(top_log_probs=-1), "top_log_probs must be an integer, at least 0; got -1"),
        (dict(top_log_probs=38), "top_log_probs must be an integer, from 0 to 37; got 38"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        st.generate(tiny_model(), PROMPTS, **options)


def test_streams_have_tokens_alone():
    with pytest.raises(ValueError, match="log_probs = True.*: stream yields tokens alone; use gen"):
        st.stream(tiny_model(), PROMPTS, log_probs=True)
