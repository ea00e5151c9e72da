"""JSON schemas at random, and random texts of automata."""

import json
import random

import numpy as np

NAMES = ("a", "b", "c", "dd")
PATTERNS = ("^a", "b$", "^[a-c]*$", "[0-9]", "^a|b$", "a.b", "^$", "(ab)+", "^[^x]{2,4}$")
VALUES = (None, True, 0, 1, -1, 3.5, "a", "", "é", 'x"y', "q\nr", [], {}, [1], {"a": 1})
VALUES += ([{"a": []}],)
# Instances that a schema and its grammar are asked about.
POOL = (*VALUES, 2, 5, 10, -0.5, "ab", "abc", [1, 2], ["a"], [None, True], {"b": None})
POOL += ({"a": 1, "b": 2}, {"dd": True}, {"a": [], "c": {}}, {"zz": 1}, [{}], [[1]], False)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def random_schema(rng, depth=3):
    """A schema with some keywords that contradict each other now and then."""
    if depth == 0 or rng.random() < 0.1:
        leaves = [True, False, {}, {"type": rng.choice(TYPES)}, {"const": rng.choice(VALUES)}]
        return rng.choice(leaves)

    def inner():
        return random_schema(rng, depth - 1)

    def some(make, most=3):
        return [make() for _ in range(rng.randint(1, most))]

    def number():
        return rng.choice((0, 1, -1, 5, 10, -3, 3.0))

    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    keywords = {
        "type": (0.6, lambda: rng.choice([*TYPES, ["string", "null"], ["object", "integer"]])),
        "enum": (0.12, lambda: some(lambda: rng.choice(VALUES), 4)),
        "const": (0.04, lambda: rng.choice(VALUES)),
        **dict.fromkeys(bounds, (0.1, number)),
        "minLength": (0.1, lambda: rng.randint(0, 3)),
        "maxLength": (0.1, lambda: rng.randint(1, 6)),
        "pattern": (0.1, lambda: rng.choice(PATTERNS)),
        "items": (0.15, inner),
        "prefixItems": (0.12, lambda: some(inner)),
        "minItems": (0.1, lambda: rng.randint(0, 2)),
        "maxItems": (0.1, lambda: rng.randint(0, 3)),
        "properties": (0.3, lambda: {name: inner() for name in rng.sample(NAMES, 2)}),
        "required": (0.15, lambda: rng.sample(NAMES, rng.randint(0, 2))),
        "additionalProperties": (0.12, inner),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), (0.1, lambda: some(inner))),
        "unevaluatedProperties": (0.03, lambda: False),
        "$ref": (0.05, lambda: "#/$defs/x"),
    }
    return {name: make() for name, (chance, make) in keywords.items() if rng.random() < chance}


def schemas(seed, count):
    """Random schemas, with what they refer to."""
    rng = random.Random(seed)
    for _ in range(count):
        schema = random_schema(rng)
        if "$ref" in json.dumps(schema):
            target = random_schema(rng, 2)
            if "$ref" in json.dumps(target):  # jsonschema does not end for some of these
                continue
            schema = schema | {"$defs": {"x": target}}
        yield schema


def texts_of(automaton, count, seed=0):
    """Texts of random walks through an automaton over bytes, those that end."""
    rng = np.random.default_rng(seed)
    likely = np.ones(256)
    likely[[*b'"}]']], likely[128:] = 20, 0.05
    for _ in range(count):
        state, text = 0, bytearray()
        while len(text) < 300:
            after = automaton.table[state, automaton.class_of]
            possible = np.flatnonzero(after >= 0)
            if automaton.accepts[state] and (possible.size == 0 or rng.random() < 0.3):
                yield text.decode()
                break
            weights = likely[possible] ** (1 if len(text) < 100 else 3)
            byte = rng.choice(possible, p=weights / weights.sum())
            state = int(after[byte])
            text.append(byte)
