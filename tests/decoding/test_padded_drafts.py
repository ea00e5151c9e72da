"""A draft whose vocabulary is padded to another size is a draft: both know the common tokens."""

import dataclasses

import jax
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.models import same_tokenizer
from stree_jax.testing import random_model
from tests.helpers import rows
from tests.methods import METHODS

FEWER, MORE = (40, 37), (37, 40)


def pair(size, draft_size):
    """A target, and a draft that is the target in all tokens that both have."""
    target = random_model(st.ModelConfig.tiny(vocab_size=size, num_layers=1))
    draft = random_model(dataclasses.replace(target.config, vocab_size=draft_size))

    def common(own, other):
        where = tuple(map(slice, map(min, own.shape, other.shape)))
        return own.at[where].set(other[where])

    nnx.update(draft, jax.tree.map(common, nnx.state(draft), nnx.state(target)))
    return target, draft


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("branching", FEWER),
        ("beam", MORE),
        pytest.param("dynamic", MORE, marks=pytest.mark.slow),
    ],
)
def test_text_is_the_targets(name, sizes):
    """Also after tokens that the draft does not have; and it drafts as well as if it had them."""
    target, draft = pair(*sizes)
    size, method = target.config.vocab_size, METHODS[name]
    prompts = [[1, 2, size - 1], [3, size - 2, 5, 6]]
    options = dict(options=rows(max_new_tokens=[20] * 2, temperature=[0.0, 1.0], key=[1, 2]))
    alone = st.generate(target, prompts, **options)
    drafting = dict(drafter=method.make(draft), topology=method.topology)
    out = st.generate(target, prompts, **options, **drafting)
    assert (out.tokens == alone.tokens).all()
    assert out.stats.tau > 2
    assert draft.config.vocab_size == sizes[1]  # the draft itself is as it was


@pytest.mark.parametrize(
    ("sizes", "same"),
    [
        ((152_064, 151_936), True),  # of Qwen2.5
        ((151_936, 151_669), True),  # of a model, and of its tokenizer
        ((128_256, 32_000), False),
        ((37, 36), False),
        ((40, 37), True),
    ],
)
def test_sizes_that_may_be_padded(sizes, same):
    assert same_tokenizer(*sizes) is same
    assert same_tokenizer(*sizes[::-1]) is same
