"""Several texts of a prompt, and texts that continue an earlier generation."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_array_equal

import stree_jax as st
from stree_jax.decoding import WholeModel
from stree_jax.decoding.plan import plan
from stree_jax.testing import assert_same_text, perturbed, tiny_model
from tests.drafters import Plain
from tests.helpers import refusal, rows
from tests.methods import KEY, PROMPTS, SAMPLED, drafts

thorough = pytest.mark.thorough

MORE = [[4, 8, 15], [16], []]
TREE, CHAIN = st.TreeTopology.from_branching((2, 1)), st.TreeTopology.chain(4)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def test_several_texts_of_a_prompt():
    model = tiny_model()
    repeated = [prompt for prompt in PROMPTS for _ in range(3)]
    options = dict(max_new_tokens=9, return_cache=True, **drafts(model))
    for key in (KEY, jax.random.split(KEY, 9)):
        options |= dict(temperature=1.0, key=key)
        got = st.generate(model, PROMPTS, n=3, **options)
        want = st.generate(model, repeated, **options)
        assert_same_text(model, plan(model, repeated, **SAMPLED), got, want)
        assert len({*map(tuple, got.tokens[:3].tolist())}) > 1


def joined(prompts, generation, more):
    return [
        [*prompt, *tokens[:count], *new]
        for prompt, tokens, count, new in zip(
            prompts, generation.tokens.tolist(), generation.lengths, more, strict=True
        )
    ]


@pytest.fixture
def draft_reads(monkeypatch):
    """The numbers of tokens that draft models read, at each call that reads any."""
    lengths, read = [], WholeModel.read

    def counting(self, state, tokens, hidden, count):
        if count.any():
            lengths.append(int(count.max()))
        return read(self, state, tokens, hidden, count)

    monkeypatch.setattr(WholeModel, "read", counting)
    return lengths


@thorough
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("plain", "heads"),
        ("plain", "branching"),
        *(slow("mamba2attn hybrid", name) for name in ("dynamic", "turns", "mtp head")),
    ],
)
def test_texts_go_on(family, name, draft_reads):
    """Of rows that ended long ago; draft models read what is new alone."""
    model = tiny_model(family)
    options = drafts(model, name, 0.02)
    one, two, _ = st.generate(model, PROMPTS, max_new_tokens=30).tokens.tolist()
    # Ends the first row after 5 tokens or more, and not the second.
    place = next(i for i in range(4, 30) if one.index(one[i]) == i and one[i] not in two[:6])
    end = one[place]
    own = rows(max_new_tokens=[30, 6, 19], eos_token=[end] * 3)
    first = st.generate(model, PROMPTS, options=own, return_prefix=True, **options)
    assert first.lengths[:2].tolist() == [place + 1, 6]
    texts = joined(PROMPTS, first, MORE)
    common = dict(max_new_tokens=40, return_cache=True)
    want = st.generate(model, texts, **common)
    draft_reads.clear()
    got = st.generate(model, MORE, after=first.prefix, **common, **options)
    assert {*draft_reads} <= {len(MORE[0])}
    assert_same_text(model, plan(model, texts, max_new_tokens=40), got, want)
    whole = st.generate(model, texts, **common, **options)
    assert_array_equal(got.stats.accepted_per_depth, whole.stats.accepted_per_depth)
    assert got.stats.num_accepted > 0
    if name == "branching":
        assert draft_reads
        assert first.prefix.drafter.model_state.has_catch_up.any()
        # Nothing was consumed: it continues from there without drafts, and with those of others.
        other = st.ModelDrafter(perturbed(model, 0.1, seed=5))
        for drafter in (None, other, st.NgramDrafter()):
            again = st.generate(model, MORE, after=first.prefix, drafter=drafter, **common)
            assert_array_equal(again.tokens, want.tokens)


def other_settings(draft, other):
    """Drafters of the same weights with states of other slots or trees."""
    return {
        "trees": [dict(drafter=st.ModelDrafter(draft), topology=t) for t in (TREE, CHAIN)],
        "turns": [dict(drafter=st.InterleavedDrafter(draft, other, x)) for x in ("ssq", "qss")],
    }


@thorough
@pytest.mark.parametrize("kind", ["trees", slow("turns")])
def test_a_drafter_with_other_settings_goes_on(kind):
    """It accepts the drafts that it does in whole texts: what its state lacks it reads again."""
    model = tiny_model()
    weights = perturbed(model, 0.1), perturbed(model, 0.2)
    for before, after in itertools.permutations(other_settings(*weights)[kind]):
        own = rows(max_new_tokens=[9, 9, 24])  # all buffers have one size
        first = st.generate(model, PROMPTS, options=own, return_prefix=True, **before)
        got = st.generate(model, MORE, after=first.prefix, max_new_tokens=24, **after)
        want = st.generate(model, joined(PROMPTS, first, MORE), max_new_tokens=24, **after)
        assert_array_equal(got.tokens, want.tokens)
        assert_array_equal(got.stats.accepted_per_depth, want.stats.accepted_per_depth)


@thorough
def test_a_users_drafter_goes_on():
    """It does not say which hidden states it reads, so it gets them, in the target's program."""
    model, options = tiny_model(), dict(drafter=Plain(perturbed(tiny_model(), 0.1)))
    first = st.generate(model, PROMPTS, max_new_tokens=9, return_prefix=True, **options)
    texts = joined(PROMPTS, first, MORE)
    want = st.generate(model, texts, max_new_tokens=24)
    got = st.generate(model, MORE, after=first.prefix, max_new_tokens=24, **options)
    scheduler = st.Scheduler(model, rows=2, max_length=96, prefill_tokens=8, **options)
    ids = [scheduler.submit(st.Request(text, max_new_tokens=24)) for text in texts]
    served = {one.request_id: one.tokens for one in scheduler.completions()}
    assert_array_equal(got.tokens, want.tokens)
    assert [served[i] for i in ids] == want.tokens.tolist()
    assert got.stats.num_accepted > 0


def test_a_prefix_is_read_on_by_longer_texts_that_have_room():
    model = tiny_model()
    request = plan(model, PROMPTS[:1], max_new_tokens=50)
    decoder, context = request.decoder, request.context
    prefix = decoder.read(model, None, context)
    for length in (len(PROMPTS[0]) - 1, decoder.max_length + 1):
        text = st.Context(jnp.zeros((1, decoder.capacity), jnp.int32), jnp.full(1, length))
        refusal(
            f"row 0 has a prefix of .* and a text of {length}:",
            decoder.read,
            model,
            None,
            text,
            prefix,
        )


@thorough
def test_one_row_serves_many_prompts():
    model = tiny_model()
    options = dict(max_new_tokens=9, n=2, **SAMPLED, **drafts(model))
    stem = st.generate(model, PROMPTS[:1], keep=[2, 4], **options).kept[4]
    got = st.generate(model, MORE, after=stem, **options)
    want = st.generate(model, [[*PROMPTS[0][:4], *new] for new in MORE], **options)
    assert_array_equal(got.tokens, want.tokens)
    assert got.stats.num_accepted == want.stats.num_accepted
