"""Regular expressions and JSON schemas: texts that a grammar allows are valid."""

import itertools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import stree_jax as st
from stree_jax.decoding.grammar.patterns import byte_automaton
from stree_jax.decoding.grammar.schema import regex_of_schema
from stree_jax.decoding.token_bytes import token_bytes

END = 0


@pytest.fixture(scope="module")
def tokenizer():
    return st.load_tokenizer(st.demo_path("target"))


@jax.jit
def mask(tables, states):
    return tables.mask(states, tables.vocab_size)


@jax.jit
def after(tables, states, tokens):
    return tables.after(states, tokens)


def walks(automaton, tokenizer, num_walks=40, most=40):
    """Texts of random walks that end."""
    texts, rng = token_bytes(tokenizer), np.random.default_rng(0)
    tables, states = automaton.next_state, np.full((num_walks, 1), automaton.start)
    paths = [b""] * num_walks
    running = np.ones(num_walks, bool)
    for _ in range(most):
        allowed = np.asarray(mask(tables, jnp.asarray(states)))[:, 0]
        assert allowed.any(axis=-1).all()
        # Shorter tokens, and ends, are more probable: then texts are short.
        weight = [math.log(0.2) if text is None else -len(text) for text in texts]
        noise = rng.gumbel(size=allowed.shape) + weight
        tokens = np.where(allowed, noise, -np.inf).argmax(axis=-1)
        for row in np.flatnonzero(running & (tokens != END)):
            paths[row] += texts[tokens[row]]
        running &= tokens != END
        states = np.asarray(after(tables, jnp.asarray(states), jnp.asarray(tokens[:, None])))
    return [
        path.decode() for path, is_running in zip(paths, running, strict=True) if not is_running
    ]


PATTERNS = [
    "(ab)+",
    "a|ab|abc",
    "(a|b)*abb",
    "a*?b",
    "(a|)(b|)",
    "^[ab]{2,3}$",
    r"a\$",
    r"[$^]*\^",
    "(?i)AB",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_short_texts(pattern):
    """Over the letters of the pattern, exactly those that `re` matches as a whole."""
    of_bytes = byte_automaton(pattern)
    for length in range(6):
        for text in map("".join, itertools.product("abc$", repeat=length)):
            state = 0
            for byte in text.encode():
                state = of_bytes.next_state[state, byte] if state >= 0 else -1
            accepted = state >= 0 and of_bytes.accepts[state]
            assert accepted == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9]{3}-[0-9]{4}",
        "(yes|no)( maybe)?",
        "é+[^a-z]",
        ".{0,9}",
        r"^[A-Z][a-z]* \d{1,3}$",
        "([a-z]+ ){2}",
    ],
)
def test_texts_match(pattern, tokenizer):
    texts = walks(st.regex(pattern, tokenizer), tokenizer)
    assert len(set(texts)) > 2
    for text in texts:
        assert re.fullmatch(pattern, text), text


SCHEMAS = {
    "object": {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer"},
            "tags": {
                "type": "array",
                "items": {"enum": ["a", "b c", 3, None, True, {"k": 1}]},
                "maxItems": 3,
            },
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"const": 'x"'}}},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": ["null", "boolean"]},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["leaf", "kids"],
            }
        },
    },
    "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "number"}]},
    "numbered": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    "pattern": {"type": "string", "pattern": "^(?:ab|c)+|d$"},
    "any": {"anyOf": [{"type": "null"}, {"allOf": [{"type": "boolean"}]}]},
    "map": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
}
SCHEMAS |= {
    name: {"type": "string", "format": name}
    for name in ("date", "time", "date-time", "uuid", "email", "uri")
}


def texts_of_bytes(of_bytes, num_texts=60):
    """Texts of random walks, of which half the steps are on a shortest way to an end."""
    rng, far = np.random.default_rng(0), 10**6
    distance = np.where(of_bytes.accepts, 0, far)
    for _ in range(len(distance)):
        after = np.where(of_bytes.next_state < 0, far, distance[of_bytes.next_state])
        distance = np.minimum(distance, after.min(axis=1) + 1)
    for _ in range(num_texts):
        state, text = 0, b""
        while not of_bytes.accepts[state] or (rng.random() < 0.7 and len(text) < 30):
            possible = np.flatnonzero(of_bytes.next_state[state] >= 0)
            if len(possible) == 0:
                break
            nearest = distance[of_bytes.next_state[state, possible]]
            if rng.random() < 0.5:
                possible = possible[nearest == nearest.min()]
            byte = rng.choice(possible)
            text, state = text + bytes([byte]), of_bytes.next_state[state, byte]
        yield text.decode()


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_valid(name):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER)
    texts = {*texts_of_bytes(byte_automaton(regex_of_schema(schema)))}
    assert len(texts) > 1
    for text in texts:
        checker.validate(json.loads(text))


def test_a_schema_over_tokens(tokenizer):
    schema = SCHEMAS["object"]
    texts = walks(st.json_schema(schema, tokenizer), tokenizer, most=60)
    assert len(texts) > 5
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_schemas_as_text_and_as_class(tokenizer):
    class Model:
        @staticmethod
        def model_json_schema():
            return {"type": "boolean"}

    for schema in ('{"type": "boolean"}', Model):
        assert set(walks(st.json_schema(schema, tokenizer), tokenizer)) == {"true", "false"}


def test_which_tokens_end(tokenizer):
    """By name, by argument, or those of a tokenizer of transformers."""

    class Fast:
        backend_tokenizer = tokenizer
        eos_token_id = 7

    def ends(automaton):
        """The only token after "x"."""
        after = automaton.advance(
            jnp.array([[automaton.start]]), jnp.array([tokenizer.encode("x").ids])
        )
        return np.flatnonzero(automaton.next_state.mask(after, 4096)).tolist()

    assert ends(st.regex("x", tokenizer)) == [0]
    assert ends(st.regex("x", tokenizer, eos_token=[5, 9])) == [5, 9]
    assert ends(st.regex("x", Fast())) == [7]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing ), unterminated subpattern at position 0"),
        ("[a", "unterminated character set"),
        ("*", "nothing to repeat"),
        ("a)", "unbalanced parenthesis"),
        ("(?=a)b", "look-around, references"),
        (r"(a)\1", "look-around, references"),
        ("a^b", "anchors"),
        ("a$|b", "anchors"),
        ("a{1000000}", "repeats a part 1000000 times; at most 10000 are possible"),
    ],
)
def test_bad_patterns(pattern, message, tokenizer):
    refused(lambda: st.regex(pattern, tokenizer), message)


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "schema must be a dictionary or a JSON text, got 3"),
        ("{", "the schema is not JSON: "),
        (False, "the schema must be a dictionary, got False"),
        ({"type": "text"}, "the schema has the unknown type 'text'"),
        ({"required": ["a"]}, "the schema has 'required' and no type"),
        ({"type": "integer", "minimum": 0}, "the schema has 'minimum', which a grammar cannot"),
        (
            {"properties": {"a": {"type": "array", "items": {"type": "number", "multipleOf": 2}}}},
            "the schema.a[] has 'multipleOf', which a grammar cannot enforce here",
        ),
        (STRING | {"pattern": ".*"}, "matches quotes, backslashes or control characters"),
        (STRING | {"pattern": "("}, "unterminated subpattern"),
        (STRING | {"pattern": 3}, "has the pattern 3, which is no text"),
        (STRING | {"pattern": "a", "maxLength": 3}, "a grammar can have one of them"),
        (STRING | {"format": "ipv4"}, "has the format 'ipv4'; known: ['date', "),
        (STRING | {"maxLength": -1}, "maxLength of the schema must be an integer, at least 0"),
        (STRING | {"minLength": 3, "maxLength": 2}, "has minLength 3 and maxLength 2"),
        (STRING | {"maxLength": 1_000_000}, "at most 10000 are possible"),
        ({"allOf": [{}, {}]}, "'allOf' of the schema has 2 parts"),
        ({"$ref": "#/x"}, "refers to '#/x', which is not there"),
        ({"$ref": "a.json"}, "refers to 'a.json'; only #/... is possible"),
        ({"$ref": "#"}, "refers to itself without an end"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "refers to itself without"),
        ({"properties": []}, "'properties' of the schema must be a dictionary"),
        ({"properties": {'a"': {}}}, "names with quotes, backslashes or control"),
        ({"properties": {}, "required": ["a"]}, "requires 'a', which is not in its properties"),
        ({"const": {"a.b": 1}}, "has an object with the property 'a.b'"),
        ({"enum": []}, "'enum' of the schema is empty"),
        ({"type": "object", "maxProperties": 3}, "counts its properties"),
        ({"prefixItems": [{}], "minItems": 2}, "has 1 prefixItems, not 2 to 1"),
    ],
)
def test_bad_schemas(schema, message, tokenizer):
    refused(lambda: st.json_schema(schema, tokenizer), message)


def test_other_refusals(tokenizer, monkeypatch):
    plain = type(tokenizer).from_str(tokenizer.to_str().replace("<|endoftext|>", "<|other|>"))
    refused(
        lambda: st.regex("x", plain), "pass eos_token=..., the id of the token that ends a text"
    )
    refused(lambda: st.regex("x", tokenizer, eos_token=()), "eos_token is empty")
    refused(
        lambda: st.regex("x", tokenizer, eos_token=5000), "eos_token must be an integer, from 0"
    )
    refused(lambda: st.regex("x", "gpt2"), "tokenizer must be that of st.load_tokenizer(path)")
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    refused(lambda: st.regex("x", tokenizer), "pip install 'stree-jax[grammar]'")


def refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)
