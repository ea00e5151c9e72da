"""What does a grammar from a schema cost?

Everyday schemas are compiled for the embedded tokenizer and, if ../shared is there, for that of
GPT-2 with 50,257 tokens; the memory is that of NumPy and Python at its highest, without the
vocabulary's tree, which all grammars share. The public test suite of JSON Schema is counted, if it
is there.

    python -m benchmarks.text [--rounds 3]
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

import stree_jax as st
from benchmarks.common import Found, main
from benchmarks.prompts import SHARED
from stree_jax.extensions.grammar.json_text import automaton_of_schema
from stree_jax.measuring.clock import num_bytes, summary
from stree_jax.measuring.report import Table

OPTIONS = {"--rounds": 3}

COLUMNS = {
    "schema": "{schema}, {vocabulary} tokens",
    "seconds": "{seconds[median]:.2f}",
    "tables, bytes": "{table_bytes:,}",
    "peak, bytes": "{peak_bytes:,}",
}

_NAMED = {f"field_{i}": {"type": "string", "maxLength": 20 * (i + 1)} for i in range(10)}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 50},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 10},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street"],
        },
    },
    "required": ["name", "age"],
}
SCHEMAS: dict[str, Any] = {
    "any JSON: {}": {},
    "a string of up to 1,000": {"type": "string", "maxLength": 1000},
    "a person": _PERSON,
    "10 strings of up to 200": {"type": "object", "properties": _NAMED, "required": [*_NAMED]},
    "20 untyped properties": {"type": "object", "properties": {f"p{i}": {} for i in range(20)}},
    "1,000 given texts": {"enum": [f"value number {i}" for i in range(1000)]},
    "up to 5 people": {"type": "array", "items": _PERSON, "maxItems": 5},
}


def vocabularies() -> dict[str, tuple[Tokenizer, int]]:
    """Tokenizers of grammars with an end token each, by the number of their tokens."""
    found = {"4,096": (st.load_tokenizer(st.demo_path("target")), 0)}
    if (file := SHARED / "tokenizers/gpt2.json").is_file():
        found["50,257"] = Tokenizer.from_file(str(file)), 50256
    return found


def grammar_row(schema: Any, tokenizer: Tokenizer, end: int, rounds: int) -> dict[str, Any]:
    """Seconds of a grammar, its tables, and the memory that making it takes."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        grammar = st.json_schema(schema, tokenizer, eos_token=end)
        seconds.append(time.perf_counter() - began)
    tracemalloc.start()
    st.json_schema(schema, tokenizer, eos_token=end)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tables = num_bytes(grammar.next_state)
    return {"seconds": summary(seconds), "table_bytes": tables, "peak_bytes": peak}


def suite_counts() -> dict[str, Any]:
    """How many schemas of the public suite are read, and which instances they allow."""
    counted = ("schemas", "read", "slowest", "valid", "valid_allowed", "invalid", "invalid_allowed")
    found: dict[str, Any] = dict.fromkeys(counted, 0)
    for file in sorted((SHARED / "json_schema_test_suite").glob("*.json")):
        for group in json.loads(file.read_text()):
            found["schemas"] += 1
            began = time.perf_counter()
            try:
                automaton, _ = automaton_of_schema(group["schema"])
            except ValueError:
                continue
            finally:
                found["slowest"] = max(found["slowest"], time.perf_counter() - began)
            found["read"] += 1
            for case in group["tests"]:
                text = json.dumps(case["data"], ensure_ascii=False)
                kind = "valid" if case["valid"] else "invalid"
                found[kind] += 1
                found[f"{kind}_allowed"] += automaton.matches(text.encode())
    return found


def run(options: argparse.Namespace) -> Iterator[Found]:
    """Grammars, and the suite."""
    grammars = []
    for vocabulary, (tokenizer, end) in vocabularies().items():
        st.regex("a", tokenizer, eos_token=end)  # makes the tree that all grammars share
        for name, schema in SCHEMAS.items():
            row = grammar_row(schema, tokenizer, end, options.rounds)
            grammars.append({"schema": name, "vocabulary": vocabulary} | row)
    suite = suite_counts()
    slowest = max(grammars, key=lambda row: row["seconds"]["median"])
    yield Found(
        {"grammars": grammars, "suite": suite},
        [Table("Grammars", grammars, COLUMNS)],
        wrong=[f"{suite['invalid_allowed']} invalid texts"] if suite["invalid_allowed"] else [],
        line={"slowest": slowest["schema"], "seconds": slowest["seconds"]["median"]} | suite,
    )


if __name__ == "__main__":
    main(run, OPTIONS)
