"""A draft whose vocabulary is padded to another size is a draft: both know the common tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import stree_jax as st
from stree_jax.models import same_tokenizer
from stree_jax.testing import perturbed, random_model

SIZES = {"fewer tokens": (40, 37), "more tokens": (37, 40)}
DRAFTERS = {
    "tree": lambda draft: dict(drafter=st.ModelDrafter(draft)),
    "beam": lambda draft: dict(drafter=st.BeamDrafter(draft), topology=st.TreeTopology.beam(2, 3)),
    "dynamic": lambda draft: dict(
        drafter=st.DynamicDrafter(draft), topology=st.TreeTopology.budget(6, 3)
    ),
    "cascade": lambda draft: dict(drafter=st.CascadeDrafter(draft, st.NgramDrafter())),
    "interleaved": lambda draft: dict(
        drafter=st.InterleavedDrafter(draft, perturbed(draft, 0.1), "qsqs")
    ),
}


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


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_text_is_the_targets(name, sizes):
    """Also after tokens that the draft does not have; and it drafts as well as if it had them."""
    target, draft = pair(*SIZES[sizes])
    size = target.config.vocab_size
    prompts = [[1, 2, size - 1], [3, size - 2, 5, 6]]
    options = dict(max_new_tokens=20, temperature=[0.0, 1.0], key=jax.random.key(1))
    alone = st.generate(target, prompts, **options)
    out = st.generate(target, prompts, **options, **DRAFTERS[name](draft))
    assert (out.tokens == alone.tokens).all()
    assert out.stats.tau > 2


def test_a_scheduler_and_what_a_draft_loads_are_as_with_one_size():
    target, draft = pair(40, 37)
    requests = [st.Request([1, 2, 39], max_new_tokens=9), st.Request([5], max_new_tokens=7)]
    pool = st.Scheduler(target, rows=2, max_length=40, drafter=st.ModelDrafter(draft))
    ids = [pool.submit(each) for each in requests]
    found = {each.request_id: each.tokens for each in pool.completions()}
    for request_id, each in zip(ids, requests, strict=True):
        out = st.generate(target, [each.prompt], max_new_tokens=each.max_new_tokens)
        assert found[request_id] == out.tokens[0].tolist()
    assert draft.config.vocab_size == 37  # the draft itself is as it was
    assert draft(jnp.array([[1]])).shape[-1] == 37


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
