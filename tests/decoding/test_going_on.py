"""Several texts of a prompt, and texts that continue an earlier generation."""

import jax
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.options import plan
from stree_jax.testing import PROMPTS, assert_same_text, perturbed, tiny_model
from tests.helpers import heads_of

TREE = st.TreeTopology.from_branching((2, 2))
KEY = jax.random.key(5)
SAMPLED = dict(temperature=1.0, key=KEY)
MORE = [[4, 8, 15], [], [16]]


def slow(*case):
    return [pytest.param(*case, marks=pytest.mark.slow)]


def drafts(model):
    return dict(drafter=st.ModelDrafter(perturbed(model, 0.1)), topology=TREE)


def heads(model):
    return dict(drafter=st.MedusaDrafter(model, heads_of(model, amount=0.05)), topology=TREE)


@pytest.mark.parametrize("family", ["plain", *slow("mamba2attn hybrid")])
def test_several_texts_of_a_prompt(family):
    model = tiny_model(family)
    repeated = [prompt for prompt in PROMPTS for _ in range(3)]
    options = dict(max_new_tokens=9, return_cache=True, **SAMPLED, **drafts(model))
    got = st.generate(model, PROMPTS, n=3, **options)
    want = st.generate(model, repeated, **options)
    assert_same_text(model, plan(model, repeated, **SAMPLED), got, want)
    assert len({*map(tuple, got.tokens[:3].tolist())}) > 1
    keys = jax.random.split(KEY, 9)
    got, want = (
        st.generate(model, prompts, n=n, max_new_tokens=9, temperature=1.0, key=keys)
        for prompts, n in ((PROMPTS, 3), (repeated, 1))
    )
    np.testing.assert_array_equal(got.tokens, want.tokens)


def joined(prompts, generation, more):
    return [
        [*prompt, *tokens[:count], *new]
        for prompt, tokens, count, new in zip(
            prompts, generation.tokens.tolist(), generation.lengths, more, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("family", "drafting"),
    [("plain", heads), *slow("mamba2attn hybrid", drafts), *slow("mixed hybrid", None)],
)
def test_texts_go_on(family, drafting):
    """Ragged rows of which one ended early; with more tokens and without; buffers grow."""
    model = tiny_model(family)
    options = {} if drafting is None else drafting(model)
    free = st.generate(model, PROMPTS, max_new_tokens=30)
    end = int(free.tokens[0, 4])
    first = st.generate(
        model, PROMPTS, max_new_tokens=30, eos_token=end, return_prefix=True, **options
    )
    assert len({*first.lengths.tolist()}) > 1
    texts = joined(PROMPTS, first, MORE)
    want = st.generate(model, texts, max_new_tokens=40, return_cache=True, **SAMPLED)
    got = st.generate(
        *(model, MORE),
        after=first.prefix,
        max_new_tokens=40,
        return_cache=True,
        return_prefix=True,
        **SAMPLED,
        **options,
    )
    assert_same_text(model, plan(model, texts, max_new_tokens=40, **SAMPLED), got, want)
    if drafting is not None:
        assert got.stats.num_accepted > 0
    # Nothing was consumed, and it continues from there.
    again = st.generate(model, MORE, after=first.prefix, max_new_tokens=40, **SAMPLED)
    np.testing.assert_array_equal(again.tokens, want.tokens)
    further = st.generate(model, [[]] * 3, after=got.prefix, max_new_tokens=8, **options)
    texts = joined(texts, got, [[]] * 3)
    np.testing.assert_array_equal(
        further.tokens, st.generate(model, texts, max_new_tokens=8).tokens
    )


def test_one_row_serves_many_prompts():
    model = tiny_model("mamba2attn hybrid")
    stem = st.generate(model, PROMPTS[:1], max_new_tokens=5, return_prefix=True)
    texts = [joined(PROMPTS[:1], stem, [new])[0] for new in MORE for _ in range(2)]
    options = dict(max_new_tokens=9, **SAMPLED, **drafts(model))
    got = st.generate(model, MORE, after=stem.prefix, n=2, **options)
    np.testing.assert_array_equal(got.tokens, st.generate(model, texts, **options).tokens)
    rows = jax.tree.map(lambda leaf: leaf[np.array([0, 0])], stem.prefix)
    two = st.generate(model, MORE[:2], after=rows, max_new_tokens=9)
    texts = [joined(PROMPTS[:1], stem, [new])[0] for new in MORE[:2]]
    np.testing.assert_array_equal(two.tokens, st.generate(model, texts, max_new_tokens=9).tokens)


def test_what_is_refused():
    model = tiny_model()
    prefix = st.generate(model, PROMPTS, max_new_tokens=2, return_prefix=True).prefix
    for prompts, options, message in (
        ([[1], [2]], {}, "after has 3 rows, and prompts 2; give a prompt for each row"),
        ([[1], [2], [99]], {}, r"prompts\[2\] has token id 99, outside the vocabulary"),
        ([[1]] * 3, dict(model=tiny_model("bamba hybrid")), "after was read with another model"),
        ([[1]] * 3, dict(n=0), "n must be an integer, at least 1; got 0"),
        ([[1]] * 3, dict(max_length=4), r"prompts\[2\] has 13 tokens .*, and the limit is 4"),
    ):
        with pytest.raises(ValueError, match=message):
            st.generate(**dict(model=model, prompts=prompts, after=prefix) | options)
    failed = prefix._replace(
        context=prefix.context._replace(length=prefix.context.length.at[1].set(0))
    )
    with pytest.raises(ValueError, match="row 1 of after failed: its logits were not finite"):
        st.generate(model, [[1]] * 3, after=failed)
