"""Texts under a grammar: of trees and of autoregressive decoding, with a tokenizer of words."""

import json
import re

import jax
import jsonschema
import pytest

import stree_jax as st
from stree_jax.testing import perturbed, random_model

pytestmark = pytest.mark.thorough

PATTERN = r"(?:[0-9]{3}-[0-9]{4}|[a-z]{2,12}\.)(?: or [é-ü]{1,3})?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b c", 3, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "tags"],
}


def is_valid(text, name):
    if name == "pattern":
        return re.fullmatch(PATTERN, text) is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.fixture(scope="module")
def tokenizer():
    return st.load_tokenizer(st.demo_path("target"))


@pytest.fixture(scope="module")
def model(tokenizer):
    config = st.ModelConfig.tiny(vocab_size=tokenizer.get_vocab_size(), num_layers=1)
    return random_model(config)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    both = st.regex(PATTERN, tokenizer), st.json_schema(SCHEMA, tokenizer)
    return dict(zip(("pattern", "schema"), st.Automaton.joined(both), strict=True))


def texts(model, grammars, **drafts):
    """Completions of requests with one grammar each, or none, at temperatures 0 and 1."""
    scheduler = st.Scheduler(model, rows=4, max_length=128, **drafts)
    asked = {}
    for name in (*grammars, None):
        for seed, temperature in enumerate((0.0, 1.0, 1.0)):
            request = st.Request(
                [5 + seed, 7],
                max_new_tokens=80 if name else 9,
                temperature=temperature,
                key=jax.random.key(seed),
                eos_token=0,
                processors=[grammars[name]] if name else (),
            )
            asked[scheduler.submit(request)] = name, seed
    return {asked[done.request_id]: done for done in scheduler.completions()}


def test_trees_under_grammars(model, grammars, tokenizer):
    """Both give the same valid texts, in one scheduler with a text without a grammar."""
    topology = st.TreeTopology.from_branching((2, 2, 1))
    drafter = st.ModelDrafter(perturbed(model, 0.05))
    found = texts(model, grammars, drafter=drafter, topology=topology)
    plain = texts(model, grammars)
    for asked, completion in found.items():
        assert completion.tokens == plain[asked].tokens, asked
        if asked[0] is not None:
            assert completion.finish_reason == "end_token"
            assert is_valid(tokenizer.decode(completion.tokens), asked[0])
    assert len({tuple(completion.tokens) for completion in found.values()}) >= 7
    # Most of the drafts would be ruled out, if the draft model did not know the grammar.
    drafted = [found[asked].stats for asked in found if asked[0] == "schema"]
    assert sum(each.num_tokens for each in drafted) > 2 * sum(
        each.num_target_calls for each in drafted
    )
