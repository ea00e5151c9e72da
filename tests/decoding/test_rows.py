"""Rows with different options: each gives what a request with these options gives."""

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.testing import PROMPTS, perturbed, tiny_model

TREE = st.TreeTopology.from_branching((2, 2))
ROWS = [
    dict(temperature=0.0, max_new_tokens=7, key=1),
    dict(temperature=0.7, top_k=5, key=2),
    dict(temperature=1.0, min_p=0.1, key=3, filters=(st.TopP(0.9),)),
    dict(temperature=1.3, key=4, stop=[[7], [3, 1]], eos_token=(), max_new_tokens=20),
    dict(temperature=1.0, key=5, eos_token=[1, 2, 9], min_new_tokens=4),
    dict(temperature=0.0, key=2**32 - 1, eos_token=11, processors=[st.BannedTokens([4, 5])]),
    dict(temperature=1.0, top_p=0.8, key=3, processors=[st.BannedTokens([6, 7])]),
]
TEXTS = [PROMPTS[i % 3] for i in range(len(ROWS))]
DEFAULTS = {**st.Options(max_new_tokens=12)}


def lists():
    """One list of values for each option that any row has."""
    names = {name for row in ROWS for name in row}
    return {name: [row.get(name, DEFAULTS[name]) for row in ROWS] for name in names}


@pytest.mark.parametrize("drafting", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_row_has_its_own(drafting):
    model = tiny_model()
    draft = st.ModelDrafter(perturbed(model, 0.1))
    drafts = dict(drafter=draft, topology=TREE) if drafting else {}
    out = st.generate(model, TEXTS, log_probs=True, **lists(), **drafts)
    assert out.tokens.shape == (len(ROWS), 20)
    scheduler = st.Scheduler(model, rows=3, max_length=40, drafter=draft, topology=TREE)
    for text, row in zip(TEXTS, ROWS, strict=True):
        scheduler.submit(st.Request(text, **{**DEFAULTS, **row}))
    for done in scheduler.completions():
        i = done.request_id
        count = out.lengths[i]
        assert out.tokens[i, :count].tolist() == done.tokens, ROWS[i]
        assert out.finish_reasons[i] == done.finish_reason
        assert np.isfinite(out.log_probs[i, :count]).all()
    if drafting:
        assert out.stats.num_accepted > 0
    assert len({*out.finish_reasons}) > 1
    assert len({*out.lengths.tolist()}) > 2


def test_arrays_and_lists_are_the_same():
    model, common = tiny_model(), dict(max_new_tokens=5)
    values = dict(temperature=[0.5, 1.0, 2.0], top_k=[3, 0, 4])
    want = st.generate(model, PROMPTS, key=[1, 2, 3], **values, **common).tokens
    keys = jax.vmap(jax.random.key)(np.array([1, 2, 3]))
    arrays = {name: np.array(value) for name, value in values.items()}
    for key in (keys, [*keys], np.array([1, 2, 3]), jax.random.key_data(keys)):
        got = st.generate(model, PROMPTS, key=key, **arrays, **common).tokens
        np.testing.assert_array_equal(got, want)
    seed, key = (
        plan(model, PROMPTS, temperature=1.0, key=key).keys for key in (7, jax.random.key(7))
    )
    np.testing.assert_array_equal(jax.random.key_data(seed), jax.random.key_data(key))


def test_rows_share_the_programs_of_one_value():
    """Two lists of equal filters are no other program than one."""
    one = plan(tiny_model(), PROMPTS, temperature=0.7, top_k=4, key=0)
    own = plan(tiny_model(), PROMPTS, temperature=[0.7, 0.8, 1.0], top_k=[4, 0, 2], key=0)
    assert one.decoder == own.decoder
    assert jax.tree.structure(one.sampling) == jax.tree.structure(own.sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=[0.0, 1.0]), "temperature has 2 entries for 3 rows; give one value, or"),
        (dict(temperature=[0.0, 1.0, -1.0], key=0), "temperature must be a number .*, got -1.0"),
        (dict(top_k=[]), "top_k is empty; give one value, or one for each row"),
        (dict(max_new_tokens=[1, 2, 0]), "max_new_tokens must be an integer, at least 1; got 0"),
        (dict(eos_token=[[1], None, [37]]), "eos_token must be an integer, from 0 to 36; got 37"),
        (dict(stop=[[[1]], [], ["a"]]), "stop = 'a' is a text, and needs the tokenizer"),
        (dict(temperature=[0.0, 1.0, 0.0]), "temperature > 0 needs a random key"),
        (dict(temperature=1.0, key=[1, 2]), "one for each of 3 rows, got an array of shape"),
        (
            dict(temperature=[0.0, 1.0, 0.0], key=0, verifier="multi_step"),
            r"temperature = 0.0: verifier 'multi_step' cannot decode temperature 0 and others"
            " together; use 'target_only', or decode these apart",
        ),
        (
            dict(temperature=1.0, key=0, filters=[[st.TopK(2)], [st.TopP(0.5)], []]),
            "other rows have .*, and one program decodes all; .* or decode these apart",
        ),
        (dict(max_length=20, max_new_tokens=[3, 3, 11]), r"prompts\[2\] has 10 .* limit is 20"),
    ],
)
def test_what_is_refused(options, message):
    drafter = st.ModelDrafter(tiny_model(), child_sampling="iid")
    drafts = dict(drafter=drafter, topology=TREE) if "verifier" in options else {}
    with pytest.raises(ValueError, match=message):
        st.generate(tiny_model(), PROMPTS, **options, **drafts)


def test_a_request_is_one_row():
    with pytest.raises(ValueError, match=r"top_k = \[1, 2\]: a request is one row, and takes one"):
        st.Request([1], top_k=[1, 2])
