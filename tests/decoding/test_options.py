"""`Options`, and filters of one's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.options import OptionKeywords, plan
from stree_jax.testing import (
    PROMPTS,
    assert_lossless,
    assert_same_distribution,
    perturbed,
    random_model,
    tiny_model,
)

KEY = jax.random.key(3)
TREE = st.TreeTopology.from_branching((2, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Keeps tokens at most `distance` below the best one."""

    distance: float

    def __call__(self, logits, /):
        distance = jnp.reshape(self.distance, (-1,) + (1,) * (logits.ndim - 1))
        return jnp.where(logits >= -distance, logits, -jnp.inf)


def test_the_keywords_are_the_options():
    fields = {field.name: field.default for field in dataclasses.fields(st.Options)}
    assert set(OptionKeywords.__annotations__) == set(fields)
    assert {**st.Options()} == fields
    assert {*fields} < {field.name for field in dataclasses.fields(st.Request)}
    assert all(f"`{name}`" in st.generate.__doc__ for name in fields)


def test_options_are_keywords():
    options = st.Options(max_new_tokens=5, temperature=0.8, top_k=8, key=KEY)
    want = st.generate(
        tiny_model(), PROMPTS, max_new_tokens=5, temperature=0.8, top_k=8, key=KEY
    ).tokens
    np.testing.assert_array_equal(st.generate(tiny_model(), PROMPTS, **options).tokens, want)
    assert st.Request([1], **options) == st.Request(
        [1], max_new_tokens=5, temperature=0.8, top_k=8, key=KEY
    )
    pieces = [*st.stream(tiny_model(), PROMPTS, **options)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), want)


@pytest.mark.parametrize("function", [st.generate, st.stream, plan])
def test_an_unknown_keyword_is_named(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected .* 'heat'"):
        function(tiny_model(), PROMPTS, heat=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens must be an integer, at least 1; got 0"),
        (dict(temperature=-1.0), "temperature must be a number from 0 on, got -1.0"),
        (dict(top_k=-1), "top_k must be an integer, at least 0; got -1"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(filters=(st.TopK,)), "other objects with the method of"),
        (dict(filters=(lambda logits: logits,)), "must be a pytree of numbers"),
        (dict(eos_token=-1), "eos_token must be an integer, at least 0; got -1"),
        (dict(max_length=0), "max_length must be an integer, at least 1; got 0"),
        (dict(key=jnp.zeros(7)), "key must be a random key"),
    ],
)
def test_what_is_refused(options, message):
    for make in (st.Options, lambda **given: st.Request([1], **given)):
        with pytest.raises(ValueError, match=message):
            make(**options)


def test_filters_are_checked_when_made():
    with pytest.raises(ValueError, match="top_k must be an integer, at least 0; got -1"):
        st.TopK(-1)
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 1.5"):
        st.TopP(1.5)


def test_top_k_and_top_p_are_filters():
    common = dict(max_new_tokens=16, temperature=1.0, key=KEY)
    want = st.generate(tiny_model(), PROMPTS, top_k=8, top_p=0.9, **common).tokens
    got = st.generate(tiny_model(), PROMPTS, filters=(st.TopK(8), st.TopP(0.9)), **common).tokens
    np.testing.assert_array_equal(got, want)


def test_a_filter_of_ones_own_with_shared_noise():
    drafter = st.ModelDrafter(perturbed(tiny_model(), 0.1))
    filters = (AtLeast(0.5), st.TopK(5))
    (out,) = assert_lossless(
        tiny_model(), drafter, topology=TREE, temperatures=(1.0,), filters=filters
    )
    assert out.stats.num_accepted > 0
    free = st.generate(tiny_model(), PROMPTS, max_new_tokens=24, temperature=1.0, key=KEY)
    assert not np.array_equal(out.tokens, free.tokens)


@pytest.mark.slow
def test_a_filter_of_ones_own_with_sampled_children():
    config = st.ModelConfig.tiny(vocab_size=6, num_layers=1)
    drafter = st.ModelDrafter(random_model(config, 1), child_sampling="iid")
    filters = (AtLeast(1.0),)
    out = assert_same_distribution(random_model(config), drafter, topology=TREE, filters=filters)
    assert out.stats.num_accepted > 0


@pytest.mark.slow  # test_rows.py has filters among its requests
def test_a_scheduler_mixes_filters():
    ways = [{}, dict(filters=(AtLeast(0.5),)), dict(top_k=3, filters=(AtLeast(2.0),)),
            dict(top_p=0.7), dict(temperature=0.0, filters=(AtLeast(0.1),))]  # fmt: skip
    requests = [
        st.Request(PROMPTS[i % 3], **dict(max_new_tokens=12, temperature=1.0, key=key) | way)
        for i, (way, key) in enumerate(zip(ways, jax.random.split(KEY, len(ways)), strict=True))
    ]
    scheduler = st.Scheduler(tiny_model(), rows=2, max_length=40)
    for request in requests:
        scheduler.submit(request)
    other = st.Request(
        [1], max_new_tokens=3, temperature=1.0, key=KEY, filters=(AtLeast(1.0), st.TopK(2))
    )
    with pytest.raises(ValueError, match="requests that wait or run have .*another scheduler"):
        scheduler.submit(other)
    done = {completion.request_id: completion.tokens for completion in scheduler.completions()}
    for i, request in enumerate(requests):
        options = {**request, "key": request.key[None]}
        want = st.generate(tiny_model(), [request.prompt], **options).tokens[0]
        assert done[i] == want.tolist(), i
    scheduler.submit(other)


def test_a_request_has_its_own_limit():
    scheduler = st.Scheduler(tiny_model(), rows=1, max_length=40)
    with pytest.raises(ValueError, match="in all 13, and the limit is 12"):
        scheduler.submit(st.Request([1] * 3, max_new_tokens=10, max_length=12))
