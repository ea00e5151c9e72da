"""Regular expressions and JSON schemas: texts that a grammar allows are valid."""

import itertools
import json
import math
import re
import sys
import time

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import stree_jax as st
from benchmarks.text import suite_counts
from stree_jax.decoding import token_bytes
from stree_jax.extensions.grammar import graph
from stree_jax.extensions.grammar.api import automaton_of_pattern
from stree_jax.extensions.grammar.json_text import automaton_of_schema
from tests.extensions.schemas import POOL, schemas, texts_of

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
    *(r"(ab)+", r"a|ab|abc", r"(a|b)*abb", r"a*?b", r"(a|)(b|)", r"^[ab]{2,3}$", r"a\$"),
    *(r"[$^]*\^", r"(?i)AB", r"", r"[^b]+?", r"\x61\u0062?", r"(?s:.)a|(?P<x>[ab]c)"),
    r"(a?){2}b{0,4}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_short_texts(pattern):
    """Over the letters of the pattern, exactly those that `re` matches as a whole."""
    of_bytes = automaton_of_pattern(pattern)
    for length in range(6):
        for text in map("".join, itertools.product("abc$", repeat=length)):
            assert of_bytes.matches(text.encode()) == bool(re.fullmatch(pattern, text)), text


def string(pattern, text):
    """Whether a schema's pattern allows a text."""
    automaton, _ = automaton_of_schema({"type": "string", "pattern": pattern})
    return automaton.matches(json.dumps(text, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("a", ["a", "xay"], ["", "b"]),  # somewhere in the text
        ("^a|b$", ["ab", "ax", "xb"], ["xa", "bx"]),
        ("^(^a|b)$", ["a", "b"], ["ab", ""]),
        ("(^|$|x)b|a$", ["b", "ba", "xa", "axb"], ["ab", "ax", ""]),
        ("$^", [""], ["x"]),
        (r"^\d$", ["7"], ["٣", "a"]),
        (r"^\D$", ["٣", "a", "\n"], ["7"]),
        (r"^\w$", ["a", "_", "7"], ["é", "-"]),
        (r"^\W$", ["é", "-"], ["a", "_"]),
        (r"^\s$", [" ", "\t", "\xa0", "\ufeff", "\u2028"], ["\x85", "a"]),
        (r"^\S$", ["\x85", "a"], ["\xa0", "\ufeff"]),
        ("^.$", ["a", '"', "\\", "\t", "🎉"], ["\n", "\r", "\u2028", "ab"]),
        (r"^[\w&&\]a-]$", ["&", "]", "-", "x"], ["é", "["]),
        (r"^\cJ\x41\u{1F389}\ud83c\udf89\/$", ["\nA🎉🎉/"], ["A"]),
        (r"^\p{Lu}\P{L}[^]$", ["É1\n"], ["éa.", "É1"]),
        ("^[^x]{2,3}$", ["ab", 'a"\n'], ["a", "abcd", "ax"]),
    ],
)
def test_patterns_of_schemas_are_those_of_ecma(pattern, allowed, refused):
    assert [text for text in allowed if not string(pattern, text)] == []
    assert [text for text in refused if string(pattern, text)] == []


TEXTS = ["[0-9]{3}-[0-9]{4}", "(yes|no)( maybe)?", "é+[^a-z]", ".{0,9}", "([a-z]+ ){2}"]


@pytest.mark.parametrize("pattern", [*TEXTS, r"^[A-Z][a-z]* \d{1,3}$"])
def test_texts_match(pattern, tokenizer):
    texts = walks(st.regex(pattern, tokenizer), tokenizer)
    assert len(set(texts)) > 2
    for text in texts:
        assert re.fullmatch(pattern, text), text


VALUES = {"enum": ["a", "b c", 3, None, True, {"k": 1}]}
PERSON = {
    "name": {"type": "string", "maxLength": 5},
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": VALUES, "maxItems": 3},
}
TREE = {
    "leaf": {"type": ["null", "boolean"]},
    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
}
KINDS = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("a", "b", "c")
]
FORMATS = ["date", "time", "date-time", "uuid", "email", "uri", "ipv4", "ipv6", "hostname"]
SCHEMAS = {
    "object": {
        "title": "Person",
        "type": "object",
        "properties": PERSON,
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"const": 'x"'}}},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "object", "properties": TREE, "required": [*TREE]}},
    },
    "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "number"}]},
    "numbered": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    "pattern": {"type": "string", "pattern": "^(?:ab|c)+|d$"},
    "any": {"anyOf": [{"type": "null"}, {"allOf": [{"type": "boolean"}]}]},
    "map": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "of a range": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20, "not": {"const": 3}},
    "even": {"type": "integer", "multipleOf": 2, "exclusiveMinimum": 7},
    "one of three": {"oneOf": KINDS},
    "several patterns": {"type": "string", "pattern": "a", "minLength": 3, "not": {"pattern": "b"}},
    "anything": {},
    **{name: {"type": "string", "format": name} for name in FORMATS},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_valid(name):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER)
    texts = {*texts_of(automaton_of_schema(schema)[0], 60)}
    assert len(texts) > 1
    for text in texts:
        checker.validate(json.loads(text))


# Schemas, and values that their grammar allows and refuses.
MEANINGS = [
    ({"type": "string", "enum": ["a", None]}, ["a"], [None]),
    ({"type": "null", "const": 1, "$defs": {}}, None, None),
    ({"type": ["object", "null"], "properties": {"a": {}}}, [{"a": 1}, None], [3, []]),
    ({"type": "null", "prefixItems": [{}]}, [None], [[1]]),
    ({"properties": {"a": {"type": "null"}}}, [3, [], {"a": None}], [{"a": 1}]),
    ({"required": ["a"]}, [3, {"a": 1}, {"a": 1, "b": 2}], [{}]),
    ({"anyOf": [{"type": "null"}, {"const": 3}], "type": "integer"}, [3], [None, 4]),
    ({"$ref": "#/anyOf/0", "anyOf": [{"type": "null"}, {"type": "string"}]}, [None], ["a", 3]),
    ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}}, [None], [1]),
    ({"enum": [1, 2.5, "é", [1, {"a": None}], {"b": []}]}, [1, 2.5, "é", [1, {"a": None}]], [[1]]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5], [3, 1.5]),
    ({"not": {"type": ["integer", "null"]}}, ["a", 1.5, {}], [1, None]),
    ({"if": {"const": 1}, "then": False, "else": {"type": "string"}}, ["a"], [1, 2]),
    ({"dependentRequired": {"b": ["a"]}}, [{"a": 1}, {"a": 1, "b": 1}, {}], [{"b": 1}]),
    ({"contains": {"const": 1}, "maxContains": 1}, [[1], [2, 1, 3]], [[], [1, 1]]),
    ({"patternProperties": {"^a": {"type": "null"}}}, [{"ab": None}], [{"ab": 1}]),
    ({"propertyNames": {"maxLength": 1}, "type": "object"}, [{"a": 1}], [{"ab": 1}]),
    ({"prefixItems": [{"const": 1}], "items": False}, [[], [1]], [[1, 1], [2]]),
    ({"type": "object", "properties": {"a": {}}}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        [{"a": 1, "b": None}, {"b": None}],
        [{"a": 1, "b": 2}],
    ),
    ({"type": "object", "maxProperties": 1}, [{"x": 1}], [{"x": 1, "y": 2}]),
    ({"minLength": 2.0, "type": "string"}, ["ab", "ééé"], ["é"]),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), MEANINGS)
def test_what_schemas_mean(schema, allowed, refused):
    if allowed is None:
        with pytest.raises(ValueError, match="the schema contradicts itself, or refers to"):
            automaton_of_schema(schema)
        return
    automaton, _ = automaton_of_schema(schema)

    def allows(value):
        texts = [json.dumps(value, ensure_ascii=False, separators=each) for each in SEPARATORS]
        found = {automaton.matches(text.encode()) for text in texts}
        assert len(found) == 1
        return found.pop()

    assert [value for value in allowed if not allows(value)] == []
    assert [value for value in refused if allows(value)] == []


SEPARATORS = ((", ", ": "), (",", ":"))


def compare(seed, count, num_texts):
    """Texts of grammars of random schemas are valid, and values that are not are not allowed.

    Returns:
        How many schemas were read, and the share of valid values that grammars allow.
    """
    num_read, counts = 0, {True: 0, False: 0}
    for schema in schemas(seed, count):
        validator = jsonschema.Draft202012Validator(schema)
        try:
            automaton, _ = automaton_of_schema(schema)
        except ValueError:
            continue
        num_read += 1
        for text in texts_of(automaton, num_texts, seed=num_read):
            assert validator.is_valid(json.loads(text)), (schema, text)
        for value in POOL:
            allowed = automaton.matches(json.dumps(value, ensure_ascii=False).encode())
            if validator.is_valid(value):
                counts[allowed] += 1
            else:
                assert not allowed, (schema, value)
    return num_read, counts[True] / sum(counts.values())


@pytest.mark.thorough
def test_random_schemas_against_jsonschema():
    num_read, share = compare(0, 60, 6)
    assert num_read > 30
    assert share > 0.9


@pytest.mark.slow
def test_many_random_schemas_against_jsonschema():
    num_read, share = compare(1, 1500, 12)
    assert num_read > 1000
    assert share > 0.9


@pytest.mark.slow
def test_walks_through_random_schemas(tokenizer):
    """Over tokens: what the tables of a grammar let through is valid."""
    num_texts = 0
    for schema in schemas(2, 30):
        try:
            automaton = st.json_schema(schema, tokenizer)
        except ValueError:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for text in walks(automaton, tokenizer, num_walks=8):
            assert validator.is_valid(json.loads(text)), (schema, text)
            num_texts += 1
    assert num_texts > 100


@pytest.mark.slow
def test_the_public_suite():
    """docs/generation.md has these numbers."""
    found = suite_counts()
    if not found["schemas"]:
        pytest.skip("the public suite is not here")
    assert found.pop("slowest") < 6
    assert found == {
        "schemas": 383,
        "read": 287,
        "valid": 634,
        "valid_allowed": 589,
        "invalid": 369,
        "invalid_allowed": 0,
    }


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
        ("a{,3}", "{,3} has no lower number, write {0,3}"),
        ("a{3,2}", "the repeats 3 to 2"),
        ("(?x)a b", "the flag 'x' is not supported; write the pattern without it"),
        (r"\bfoo", "word boundaries are not supported"),
        ("[a&&b]", "operations on sets of characters are not supported"),
        ("[[:alpha:]]", "[ inside of a set of characters; write \\[ for it"),
        (r"\p{Greek}", "the property 'Greek' is not known"),
        (r"\q", "unknown escape \\q"),
        ("[b-a]", "bad range of characters"),
        (r"\ud800", "is no character"),
        ("\\", "a \\ at the end"),
        ("((a|b){9}c){999}", "repeat less"),
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
def test_bad_patterns(pattern, message, tokenizer, monkeypatch):
    monkeypatch.setattr(graph, "MOST_NODES", 20_000)
    refused(message, st.regex, pattern, tokenizer)


STRING = {"type": "string"}


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "schema must be a dictionary or a JSON text, got 3"),
        ("{", "the schema is not JSON: "),
        (None, "schema must be a dictionary or a JSON text, got None"),
        (False, "so no text is valid"),
        ({"enum": []}, "so no text is valid"),
        ({"$ref": "#"}, "refers to itself without an end"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "to itself"),
        ({"type": "text"}, "the schema has the unknown type 'text'"),
        ({"type": "array", "uniqueItems": True}, "the schema has 'uniqueItems', which a grammar"),
        (
            {"properties": {"a": {"type": "array", "items": {"multipleOf": 0.1}}}},
            "the schema.a[] has 'multipleOf', which a grammar cannot enforce here",
        ),
        ({"items": {}, "additionalItems": False}, "the schema has 'additionalItems', which a"),
        ({"$dynamicRef": "#x"}, "the schema has '$dynamicRef', which a grammar cannot"),
        ({"unevaluatedItems": False, "anyOf": [{}]}, "has 'unevaluatedItems', which a grammar"),
        (STRING | {"pattern": "("}, "the schema has the pattern '(' cannot be used: missing )"),
        (STRING | {"pattern": 3}, "has the pattern 3, which is no text"),
        (STRING | {"pattern": "(?=a)"}, "look-around, references"),
        (STRING | {"pattern": "((a{90}b{90}){90}){9}"}, "parts, counted with repeats; at most"),
        (STRING | {"format": "color"}, "has the format 'color'; known: ['date', "),
        (STRING | {"maxLength": -1}, "maxLength of the schema must be an integer, at least 0"),
        (STRING | {"maxLength": True}, "maxLength of the schema must be an integer, at least 0"),
        (STRING | {"minLength": 3, "maxLength": 2}, "has minLength 3 and maxLength 2"),
        (STRING | {"maxLength": 1_000_000}, "at most 10000 are possible"),
        ({"minimum": "1"}, "minimum of the schema must be a number, got '1'"),
        ({"minimum": math.nan}, "has 'minimum', which a grammar cannot enforce"),
        ({"const": math.inf}, "has a number that is none in JSON"),
        ({"const": "\ud800"}, "which is no text of characters"),
        ({"allOf": {}}, "'allOf' of the schema must be a list of schemas, got {}"),
        ({"not": 3}, "the schema must be a dictionary, got 3"),
        ({"$ref": "#/x"}, "refers to '#/x', which is not there"),
        ({"$ref": "a.json"}, "refers to 'a.json', which is not there"),
        ({"$ref": 5}, "refers to 5, which is not there"),
        ({"properties": []}, "'properties' of the schema must be a dictionary"),
        ({"required": "a"}, "'required' of the schema must be a list of names, got 'a'"),
        ({"items": [{}]}, "'items' of the schema is a list; draft 2020-12 has 'prefixItems'"),
        (
            {"properties": {"x": {"type": "array", "minItems": 900, "items": STRING}}},
            "the schema.x cannot be used: it needs more than",
        ),
        (
            {"allOf": [{"anyOf": [{"required": [n * i]} for i in (1, 2, 3)]} for n in "abcdef"]},
            "the schema has more than 256 alternatives",
        ),
        (json.loads("[" * 300 + "{}" + "]" * 300), "schema must be a dictionary"),
        (nested(3000), "the schema is nested too deep"),
    ],
)
def test_bad_schemas(schema, message, tokenizer, monkeypatch):
    monkeypatch.setattr(graph, "MOST_STATES", 2_000)
    refused(message, st.json_schema, schema, tokenizer)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": {}, "b": {"type": "array"}}},
        STRING | {"maxLength": 10_000},
        {"type": "object", "properties": {name: STRING | {"maxLength": 500} for name in "abcdef"}},
        {"enum": [f"value {i}" for i in range(1000)]},
    ],
)
def test_everyday_schemas_take_little(schema, tokenizer):
    """Of time and memory: `{}` took a minute and a gigabyte, and `maxLength` had no end."""
    began = time.perf_counter()
    automaton = st.json_schema(schema, tokenizer)
    assert time.perf_counter() - began < 5  # 0.1 to 0.4 s on a quiet machine
    assert automaton.next_state.nbytes < 5e6


def test_other_refusals(tokenizer, monkeypatch):
    plain = type(tokenizer).from_str(tokenizer.to_str().replace("<|endoftext|>", "<|other|>"))
    refused("pass eos_token=..., the id of the token that ends a text", st.regex, "x", plain)
    refused("eos_token is empty", st.regex, "x", tokenizer, eos_token=())
    refused("eos_token must be an integer, from 0", st.regex, "x", tokenizer, eos_token=5000)
    refused("tokenizer must be that of st.load_tokenizer(path)", st.regex, "x", "gpt2")
    monkeypatch.setitem(sys.modules, "referencing", None)
    needs = "'$ref' needs referencing; in the clone: pip install '.[grammar]'"
    refused(needs, st.json_schema, {"$ref": "#/a"}, tokenizer)


def refused(message, make, *arguments, **options):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(*arguments, **options)
    assert "\n" not in str(error.value)
