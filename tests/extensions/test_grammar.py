"""Regular expressions and JSON schemas: texts that a grammar allows are valid."""

import functools
import itertools
import json
import math
import operator
import random
import re
from decimal import Decimal

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

import stree_jax as st
from benchmarks.text import suite_counts
from stree_jax.extensions.grammar import byte_automaton, graph
from stree_jax.extensions.grammar.api import automaton_of_pattern
from stree_jax.extensions.grammar.json_text import automaton_of_schema
from stree_jax.measuring.clock import num_bytes
from tests.extensions.schemas import POOL, schemas, texts_of
from tests.helpers import by_message, refusal


@pytest.fixture(scope="module")
def tokenizer():
    return st.load_tokenizer(st.demo_path("target"))


PATTERNS = [
    *(r"(ab)+", r"a|ab|abc", r"(a|b)*abb", r"a*?b", r"(a|)(b|)", r"^[ab]{2,3}$", r"a\$"),
    *(r"[$^]*\^", r"", r"[^b]+?", r"\x61\u0062?", r"(?:.)a|^[ab]c", r"(a?){2}b{0,4}"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_short_texts(pattern):
    """Over the letters of the pattern, exactly those that `re` matches as a whole."""
    of_bytes = automaton_of_pattern(pattern)
    for length in range(6):
        for text in map("".join, itertools.product("abc$", repeat=length)):
            assert of_bytes.matches(text.encode()) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("a", ["a", "xay"], ["", "b"]),  # somewhere in the text
        ("^a|b$", ["ab", "ax", "xb"], ["xa", "bx"]),
        ("^(?<name>a|b)$|^$", ["a", "b", ""], ["ab"]),
        (r"^\d$", ["7"], ["٣", "a"]),
        (r"^\D$", ["٣", "a", "\n"], ["7"]),
        (r"^\w$", ["a", "_", "7"], ["é", "-"]),
        (r"^\W$", ["é", "-"], ["a", "_"]),
        (r"^\s$", [" ", "\t", "\xa0", "\ufeff", "\u2028"], ["\x85", "a"]),
        (r"^\S$", ["\x85", "a"], ["\xa0", "\ufeff"]),
        ("^.$", ["a", '"', "\\", "\t", "🎉"], ["\n", "\r", "\u2028", "ab"]),
        (r"^[\w&&\]a-]$", ["&", "]", "-", "x"], ["é", "["]),
        (r"^\n\x41\u{1F389}\u00e9\/[^]$", ["\nA🎉é/\t"], ["A"]),
        ("^[^x]{2,3}$", ["ab", 'a"\n'], ["a", "abcd", "ax"]),
    ],
)
def test_patterns_are_those_of_ecma(pattern, allowed, refused):
    automaton, _ = automaton_of_schema({"type": "string", "pattern": pattern})

    def allows(text):
        return automaton.matches(json.dumps(text, ensure_ascii=False).encode())

    assert [text for text in allowed if not allows(text)] == []
    assert [text for text in refused if allows(text)] == []


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
CLOSED = {"required": ["name", "tags"], "additionalProperties": False}
SCHEMAS = {
    "object": {"title": "Person", "type": "object", "properties": PERSON, **CLOSED},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "object", "properties": TREE, "required": [*TREE]}},
    },
    "one of three": {"oneOf": KINDS},
    **{name: {"type": "string", "format": name} for name in FORMATS},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_texts_are_valid(schema):
    validator = jsonschema.Draft202012Validator
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER)
    texts = {*texts_of(automaton_of_schema(schema)[0], 60)}
    assert len(texts) > 1
    for text in texts:
        checker.validate(json.loads(text))


# Schemas, and values that their grammar allows and refuses.
MEANINGS = [
    ({"type": "string", "enum": ["a", None]}, ["a"], [None]),
    ({"type": ["object", "null"], "properties": {"a": {}}}, [{"a": 1}, None], [3, []]),
    ({"type": "null", "prefixItems": [{}]}, [None], [[1]]),
    ({"properties": {"a": {"type": "null"}}}, [3, [], {"a": None}], [{"a": 1}]),
    ({"required": ["a"]}, [3, {"a": 1}, {"a": 1, "b": 2}], [{}]),
    ({"anyOf": [{"type": "null"}, {"const": 3}], "type": "integer"}, [3], [None, 4]),
    ({"$ref": "#/anyOf/0", "anyOf": [{"type": "null"}, {"type": "string"}]}, [None], ["a", 3]),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, [None], [1]),
    ({"enum": [1, 2.5, "é", [1, {"a": None}], {"b": []}]}, [1, 2.5, "é", [1, {"a": None}]], [[1]]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [1.5, None]),
    ({"uniqueItems": False, "minProperties": 0, "then": False}, [[1, 1], {}], []),
    ({"prefixItems": [{"const": 1}], "items": False}, [[], [1]], [[1, 1], [2]]),
    ({"minItems": 2, "items": {"type": "null"}}, [[None] * 2, [None] * 4], [[], [None], [1, 1]]),
    ({"type": "object", "properties": {"a": {}}}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        [{"a": 1, "b": None}, {"b": None}, {"ab": None}, {"": None}],
        [{"a": 1, "b": 2}, {"ab": 1}],
    ),
    ({"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ({"minLength": 2.0, "type": "string"}, ["ab", "ééé"], ["é"]),
    ({"pattern": "^[a-c]*$", "maxLength": 2, "type": "string"}, ["", "ab"], ["abc", "x"]),
]
SEPARATORS = ((", ", ": "), (",", ":"))


@pytest.mark.parametrize(("schema", "allowed", "refused"), MEANINGS)
def test_what_schemas_mean(schema, allowed, refused):
    automaton, _ = automaton_of_schema(schema)

    def allows(value):
        texts = [json.dumps(value, ensure_ascii=False, separators=each) for each in SEPARATORS]
        found = {automaton.matches(text.encode()) for text in texts}
        assert len(found) == 1
        return found.pop()

    assert [value for value in allowed if not allows(value)] == []
    assert [value for value in refused if allows(value)] == []


HOLDS = {"minimum": operator.ge, "maximum": operator.le}
HOLDS |= {"exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt}


def test_bounds_of_numbers():
    """Texts are within them, and numbers near them are allowed exactly where they hold."""
    rng = random.Random(0)
    for seed in range(60):
        of_size = [rng.randint(-size, size) for size in (1, 30, 1000, 10**9)]
        bounds = {name: rng.choice(of_size) for name in rng.sample([*HOLDS], 1 + seed % 2)}
        automaton, _ = automaton_of_schema({"type": ["number", "null"]} | bounds)

        def holds(value, bounds=bounds):
            return all(HOLDS[name](value, bound) for name, bound in bounds.items())

        assert all(text == "null" or holds(json.loads(text)) for text in texts_of(automaton, 20))
        for bound, step in itertools.product(bounds.values(), (0, 1, 9, "0.5", "0.000001")):
            for value in (Decimal(bound) + Decimal(step), Decimal(bound) - Decimal(step)):
                allowed = automaton.matches(f"{value:f}".encode())
                assert allowed == (holds(value) and not f"{value:f}".startswith("-0.0000000"))


def compare(seed, count, num_texts):
    """How many schemas were read, and the share of valid values allowed."""
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
@pytest.mark.parametrize(
    ("seed", "count", "texts"), [(0, 60, 6), pytest.param(1, 1500, 12, marks=pytest.mark.slow)]
)
def test_random_schemas_against_jsonschema(seed, count, texts):
    num_read, share = compare(seed, count, texts)
    assert num_read > count / 2
    assert share > 0.9


@pytest.mark.slow
def test_the_public_suite():
    """docs/generation.md has these numbers."""
    found = suite_counts()
    if not found["schemas"]:
        pytest.skip("the public suite is not here")
    del found["slowest"]
    valid, invalid = dict(valid=449, valid_allowed=413), dict(invalid=232, invalid_allowed=0)
    assert found == dict(schemas=383, read=189, **valid, **invalid)


def test_a_schema_may_be_a_text_and_a_class(tokenizer):
    class Model:
        @staticmethod
        def model_json_schema():
            return SCHEMAS["object"]

    want, *others = (
        jax.tree.leaves(st.json_schema(schema, tokenizer))
        for schema in (SCHEMAS["object"], json.dumps(SCHEMAS["object"]), Model)
    )
    for leaves in others:
        jax.tree.map(np.testing.assert_array_equal, leaves, want)


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
    plain = type(tokenizer).from_str(tokenizer.to_str().replace("<|endoftext|>", "<|other|>"))
    refused("pass eos_token=..., the id of the token that ends a text", st.regex, "x", plain)
    refused("eos_token is empty", st.regex, "x", tokenizer, eos_token=())
    refused("eos_token must be an integer, from 0", st.regex, "x", tokenizer, eos_token=5000)
    refused("tokenizer must be that of st.load_tokenizer(path)", st.regex, "x", "gpt2")


BAD_PATTERNS = [
    ("(", "missing ), unterminated subpattern at position 0"),
    ("a{2}{3}", "{ that begins no number of repeats"),
    ("a+*", "nothing to repeat at position 2"),
    ("a{,3}", "{ that begins no number of repeats, such as {2,3}; write \\{ for it"),
    ("a{3,2}", "the repeats 3 to 2"),
    ("(?i)a", "a group that begins with (? and is no (?:...) or (?<name>...)"),
    (r"\p{L}", r"\p is not supported; write a set of characters, such as [a-z]"),
    (r"\q", "unknown escape \\q"),
    ("[b-a]", "bad range of characters"),
    (r"\ud800", "is no character"),
    ("\\", "a \\ at the end"),
    ("((a|b){9}c){999}", "repeat less"),
    (".*(a|b).{15}", "it needs more than 9000 states; repeat less"),
    ("[a", "unterminated character set"),
    ("a)", "unbalanced parenthesis"),
    (r"(a)\1", "look-around, references and word boundaries are not supported"),
    ("(a$|b)", "anchors inside"),
    ("a{1000000}", "repeats a part 1000000 times; at most 10000 are possible"),
    ("(" * 5000 + ")" * 5000, "is nested too deep"),
]
STRING = {"type": "string"}
OUTSIDE = [
    *("not", "if", "contains", "propertyNames", "multipleOf", "maxProperties", "minProperties"),
    *("patternProperties", "dependentRequired", "dependentSchemas", "uniqueItems", "$dynamicRef"),
    *("$recursiveRef", "additionalItems", "dependencies", "disallow", "divisibleBy", "extends"),
]


REFERENCES = [{"$ref": f"#/$defs/{i}"} for i in range(9)]


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"allOf": [schema]}
    return schema


BAD_SCHEMAS = [
    ("{", "the schema is not JSON: "),
    (None, "schema must be a dictionary or a JSON text, got None"),
    (False, "so no text is valid"),
    ({"type": "null", "const": 1, "$defs": {}}, "the schema contradicts itself, or refers to"),
    ({"$ref": "#"}, "refers to itself without an end"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "to itself"),
    ({"type": "text"}, "the schema has the unknown type 'text'"),
    *(
        ({"properties": {"a": {"items": {name: 1}}}}, f"the schema.a[] has {name!r}, which a")
        for name in OUTSIDE
    ),
    ({"unevaluatedItems": False, "anyOf": [{}]}, "has 'unevaluatedItems', which a grammar"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "has 'oneOf', whose parts may hold tog"),
    ({"minimum": 0.1}, "'minimum', which is 0.1; integers up to 1000000000 are read"),
    ({"minimum": "1"}, "minimum of the schema must be a number, got '1'"),
    (STRING | {"pattern": "("}, "the schema has the pattern '(' cannot be used: missing )"),
    (STRING | {"format": "color"}, "has the format 'color'; known: ['date', "),
    (STRING | {"maxLength": True}, "must be an integer from 0 to 10000, got True; leave it out"),
    (STRING | {"minLength": 3, "maxLength": 2}, "has minLength 3 and maxLength 2"),
    ({"const": math.inf}, "has a number that is none in JSON"),
    ({"required": ["\0"]}, "has half of a surrogate pair or a control character"),
    ({"allOf": {}}, "'allOf' of the schema must be a list of schemas, got {}"),
    ({"items": 3}, "the schema[] must be a dictionary, got 3"),
    ({"$ref": "#/x"}, "refers to '#/x', which is not there"),
    ({"$ref": "a.json"}, "refers to 'a.json', which is not there; paths in the schema are read"),
    ({"items": {"$id": "http://x"}}, "the schema[] has '$id', which a grammar cannot"),
    ({"properties": []}, "'properties' of the schema must be a dictionary"),
    ({"required": "a"}, "'required' of the schema must be a list of names, got 'a'"),
    ({"items": [{}]}, "'items' of the schema is a list; draft 2020-12 has 'prefixItems'"),
    (STRING | {"maxLength": 10_000}, "the schema cannot be used: it needs more than"),
    (
        {"allOf": [{"anyOf": [{"required": [n * i]} for i in (1, 2, 3)]} for n in "abcdef"]},
        "the schema has more than 256 alternatives",
    ),
    (
        {"$ref": "#/$defs/0", "$defs": {str(i): {"anyOf": REFERENCES} for i in range(9)}},
        "the schema cannot be used: it needs too many steps through references",
    ),
    (nested(3000), "the schema is nested too deep"),
]


@by_message(("pattern", "message"), BAD_PATTERNS)
def test_bad_patterns(pattern, message, tokenizer, monkeypatch):
    monkeypatch.setattr(graph, "MOST_NODES", 20_000)
    monkeypatch.setattr(byte_automaton, "MOST_STATES", 9_000)
    refused(message, st.regex, pattern, tokenizer)


@by_message(("schema", "message"), BAD_SCHEMAS)
def test_bad_schemas(schema, message, tokenizer, monkeypatch):
    monkeypatch.setattr(byte_automaton, "MOST_STATES", 2_000)
    refused(message, st.json_schema, schema, tokenizer)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": {}, "b": {"type": "array"}}},
        STRING | {"maxLength": 1000},
        {"type": "object", "properties": {name: STRING | {"maxLength": 99} for name in "abcdef"}},
        {"enum": [f"value {i}" for i in range(1000)]},
    ],
)
def test_tables_of_everyday_schemas_are_small(schema, tokenizer):
    """What states have in common is found, as between the copies of a counted part."""
    assert num_bytes(st.json_schema(schema, tokenizer).next_state) < 5e5


def refused(message, make, *arguments, **options):
    refusal(re.escape(message), functools.partial(make, *arguments, **options))
