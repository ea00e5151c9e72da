"""`Options`, filters of one's own, and rows with options of their own."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import stree_jax as st
from stree_jax.decoding.plan import plan
from stree_jax.testing import PROMPTS, tiny_model
from tests.helpers import refusal, rows
from tests.methods import KEY


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Keeps tokens at most `distance` below the best one."""

    distance: float

    def __call__(self, logits, /):
        distance = jnp.reshape(self.distance, (-1,) + (1,) * (logits.ndim - 1))
        return jnp.where(logits >= -distance, logits, -jnp.inf)


def test_options_are_keywords():
    given = dict(max_new_tokens=5, temperature=0.8, top_k=8, key=KEY)
    options = st.Options(**given)
    want = st.generate(tiny_model(), PROMPTS, **given).tokens
    assert_array_equal(st.generate(tiny_model(), PROMPTS, **options).tokens, want)
    assert st.Request([1], **options) == st.Request([1], **given)
    filters = dict(given, top_k=0, filters=(st.TopK(8),))
    assert_array_equal(st.generate(tiny_model(), PROMPTS, **filters).tokens, want)
    pieces = [*st.stream(tiny_model(), PROMPTS, **options)]
    assert_array_equal(np.concatenate(pieces, axis=1), want)


@pytest.mark.parametrize(
    ("strange", "way"),
    [
        ("temprature", "temperature"),
        ("json_schema", r"processors=\[st.json_schema\(...\)\]"),
        ("seed", "key=0"),
        ("xyzzy", "one of help"),
    ],
)
def test_a_strange_option_is_explained(strange, way):
    """By the function that was called, and the nearest that it has."""
    model = tiny_model()
    functions = {
        "generate": partial(st.generate, model, PROMPTS),
        "stream": partial(st.stream, model, PROMPTS),
        "complete": partial(st.complete, model, "text"),
        "bench": partial(st.bench, model, {}, PROMPTS),
        "Request": partial(st.Request, [1]),
        "Options": st.Options,
    }
    for name, function in functions.items():
        words = f"^{name}\\(\\) got an unexpected keyword argument '{strange}'; use {way}"
        with pytest.raises(TypeError, match=words):
            function(**{strange: 1})


def close(logits):
    return jnp.where(logits >= -0.5, logits, -jnp.inf)


def closer(logits):
    return jnp.where(logits >= -0.1, logits, -jnp.inf)


def test_a_filter_is_a_rule_or_a_function():
    """`AtLeast` is neither: a callable dataclass, as filters were written before."""
    texts = [
        st.generate(tiny_model(), PROMPTS, max_new_tokens=9, temperature=1.0, key=KEY, filters=keep)
        for keep in ([close], [st.stateless(close)], [AtLeast(0.5)], [closer])
    ]
    for same in texts[1:3]:
        assert_array_equal(same.tokens, texts[0].tokens)
    assert (texts[3].tokens != texts[0].tokens).any()
    options = [st.Options(temperature=1.0, key=KEY, filters=[keep]) for keep in (close, closer)]
    refusal(
        "other rows have .*, and one program decodes all", plan, tiny_model(), PROMPTS[:2], options
    )


def test_a_way_is_keywords():
    assert {**st.Way()} == {}
    assert {**st.Way(verifier="typical", lossy=True)} == dict(verifier="typical", lossy=True)


def test_keys_of_all_kinds_are_the_same():
    keys = jax.vmap(jax.random.key)(np.array([1, 2, 3]))
    first, *texts = (
        st.generate(tiny_model(), PROMPTS, **options).tokens
        for key in ([1, 2, 3], np.array([1, 2, 3]), keys, [*keys], jax.random.key_data(keys))
        for options in (
            dict(temperature=1.0, top_k=4, key=key),
            dict(options=rows(key=[*key], temperature=[1.0] * 3, top_k=[4] * 3)),
        )
    )
    for same in texts:
        assert_array_equal(same, first)
    seed, *others = (
        plan(tiny_model(), PROMPTS, temperature=1.0, key=key).keys
        for key in (7, jax.random.key(7), jax.random.PRNGKey(7))
    )
    for key in others:
        assert_array_equal(jax.random.key_data(seed), jax.random.key_data(key))


@pytest.mark.thorough
def test_rows_share_the_programs_of_one_value():
    """Two lists of equal filters are no other program than one."""
    one = plan(tiny_model(), PROMPTS, temperature=0.7, top_k=4, key=0)
    own = rows(temperature=[0.7, 0.8, 1.0], top_k=[4, 0, 2], key=[0] * 3)
    own = plan(tiny_model(), PROMPTS, own)
    assert one.decoder == own.decoder
    assert jax.tree.structure(one.sampling) == jax.tree.structure(own.sampling)


@pytest.mark.parametrize("function", [st.generate, st.stream, st.complete])
def test_signatures_spell_out_the_options(function):
    """For notebooks that complete them, and for the API's page."""
    fields = {field.name: field.default for field in dataclasses.fields(st.Options)}
    assert {**st.Options()} == fields
    assert {*fields} < {field.name for field in dataclasses.fields(st.Request)}
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in fields} == fields
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    assert all(f"`{name}`" in st.generate.__doc__ for name in fields)
