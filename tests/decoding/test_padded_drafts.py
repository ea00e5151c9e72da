"""A draft whose vocabulary is padded to another size is a draft: both know the common tokens."""

import dataclasses

import jax
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.models import same_tokenizer
from stree_jax.testing import random_model
from tests.methods import METHODS

SIZES = {"fewer tokens": (40, 37), "more tokens": (37, 40)}


def pair(size, draft_size):
    """A target, and a draft that is the target in all tokens that both have."""
    target = random_model(st.ModelConfig.tiny(vocab_size=size, num_layers=2))
    config = dataclasses.replace(target.config, vocab_size=draft_size)
    draft = random_model(config)

    def common(own, other):
        where = tuple(map(slice, map(min, own.shape, other.shape)))
        return own.at[where].set(other[where])

    state = jax.tree.map(common, nnx.state(draft), nnx.state(target))
    nnx.update(draft, state)
    return target, draft


NAMES = ("branching", "beam", "dynamic", "cascade of lookup", "turns", "served")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [  # each method with one of the sizes, and the other one slow
        pytest.param(name, sizes, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, name in enumerate(NAMES)
        for j, sizes in enumerate(SIZES)
    ],
)
def test_text_is_the_targets(name, sizes):
    """Also after tokens that the draft does not have; and it drafts as well as if it had them."""
    target, draft = pair(*SIZES[sizes])
    size = target.config.vocab_size
    prompts = [[1, 2, size - 1], [3, size - 2, 5, 6]]
    method = METHODS["branching" if name == "served" else name]
    drafting = dict(drafter=method.make(draft), topology=method.topology)
    options = dict(max_new_tokens=20, temperature=[0.0, 1.0], key=[1, 2])
    alone = st.generate(target, prompts, **options)
    if name == "served":
        pool = st.Scheduler(target, rows=2, max_length=40, **drafting)
        for i, prompt in enumerate(prompts):
            pool.submit(st.Request(prompt, max_new_tokens=20, temperature=float(i), key=1 + i))
        found = sorted(pool.completions(), key=lambda done: done.request_id)
        assert [done.tokens for done in found] == alone.tokens.tolist()
    else:
        out = st.generate(target, prompts, **options, **drafting)
        assert (out.tokens == alone.tokens).all()
        assert out.stats.tau > 2
    assert draft.config.vocab_size == SIZES[sizes][1]  # the draft itself is as it was


@pytest.mark.parametrize(
    ("sizes", "same"),
    [
        ((152_064, 151_936), True),  # of Qwen2.5
        ((151_936, 151_669), True),  # of a model, and of its tokenizer
        ((50_288, 50_277), True),
        ((50_280, 32_000), False),
        ((128_256, 32_000), False),
        ((37, 36), False),
        ((40, 37), True),
    ],
)
def test_sizes_that_may_be_padded(sizes, same):
    assert same_tokenizer(*sizes) is same
    assert same_tokenizer(*sizes[::-1]) is same
